"""Which expert each slot holds. Pure.

A part of the experts is a row of equally many slots, and ranks are divided into equally many parts. An expert may have
several slots, on different parts: copies, which divide its tokens among them.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Experts change places for no less than this share of the mean load.
LEAST_GAIN = 0.005


@dataclass(frozen=True, slots=True)
class Placement:
    """experts: by slot, the expert that it holds; slots of a part lie next to each other."""

    experts: tuple[int, ...]
    parts: int

    def __post_init__(self) -> None:
        assert len(self.experts) % self.parts == 0

    @property
    def slots(self) -> int:
        """Of each part."""
        return len(self.experts) // self.parts

    def part(self, index: int) -> tuple[int, ...]:
        """What the slots of a part hold."""
        return self.experts[index * self.slots : (index + 1) * self.slots]

    def copies(self, expert: int) -> list[int]:
        """The slots that hold an expert."""
        return [slot for slot, held in enumerate(self.experts) if held == expert]

    def exchanged(self, slot: int, expert: int) -> "Placement":
        """The same with another expert in one slot."""
        return Placement((*self.experts[:slot], expert, *self.experts[slot + 1 :]), self.parts)


def first_placement(experts: int, parts: int, redundant: int) -> Placement:
    """Equally many experts on each part, in order, and behind them copies of the next part's first experts."""
    own = experts // parts
    assert experts % parts == 0 and redundant <= (experts - own if parts > 1 else 0)
    held = [(part * own + index) % experts for part in range(parts) for index in range(own + redundant)]
    return Placement(tuple(held), parts)


def imbalance(placement: Placement, loads: Sequence[float]) -> float:
    """(largest - mean) / mean of the parts' loads; 0 without load. loads: by expert, divided evenly among copies."""
    copies = Counter(placement.experts)
    by_part = [
        sum(loads[expert] / copies[expert] for expert in placement.part(part)) for part in range(placement.parts)
    ]
    mean = sum(by_part) / len(by_part)
    return (max(by_part) - mean) / mean if mean else 0.0


def balanced(placement: Placement, loads: Sequence[float]) -> Placement:
    """A placement with the same slots whose parts have loads as even as may be, near the given one.

    Copies are counted as EPLB does (DeepSeek, 2025): spare slots go, one after another, to the expert with the largest
    load a copy. Then, in place of EPLB's packing from nothing, which would move nearly all: copies that are too many
    make room for those that lack, on the part with the least load, and experts of the heaviest part change places with
    others for as long as that lowers its load.
    """
    contents = [set(placement.part(part)) for part in range(placement.parts)]
    counts = _copies(loads, len(placement.experts), placement.parts)
    shares = [loads[expert] / count for expert, count in enumerate(counts)]
    _recount(contents, counts, shares)
    _even_out(contents, shares)
    return _in_slots(placement, contents)


def _copies(loads: Sequence[float], slots: int, parts: int) -> list[int]:
    """How many slots each expert gets: at most one a part."""
    counts = [1] * len(loads)
    for _ in range(slots - len(loads)):
        most = max(
            (expert for expert in range(len(loads)) if counts[expert] < parts),
            key=lambda expert: (loads[expert] / counts[expert], -expert),
        )
        counts[most] += 1
    return counts


def _recount(contents: list[set[int]], counts: Sequence[int], shares: Sequence[float]) -> None:
    """Give each expert as many copies as it should have; every part keeps its number of slots."""
    sizes = [len(held) for held in contents]
    sums = [sum(shares[expert] for expert in held) for held in contents]
    for expert, count in enumerate(counts):
        holders = sorted((part for part, held in enumerate(contents) if expert in held), key=lambda part: -sums[part])
        for part in holders[: max(len(holders) - count, 0)]:
            contents[part].remove(expert)
            sums[part] -= shares[expert]
    for expert in sorted(range(len(counts)), key=lambda expert: (-shares[expert], expert)):
        while sum(expert in held for held in contents) < counts[expert]:
            lacking = [part for part, held in enumerate(contents) if expert not in held]
            free = [part for part in lacking if len(contents[part]) < sizes[part]]
            if free:
                part = min(free, key=lambda part: (sums[part], part))
            else:
                # Parts with room hold it already: one of them takes another expert from a part that does not.
                part = min(lacking, key=lambda part: (sums[part], part))
                taker = next(each for each, held in enumerate(contents) if len(held) < sizes[each])
                moved = min(contents[part] - contents[taker], key=lambda held: (shares[held], held))
                contents[part].remove(moved)
                contents[taker].add(moved)
                sums[part] -= shares[moved]
                sums[taker] += shares[moved]
            contents[part].add(expert)
            sums[part] += shares[expert]


def _even_out(contents: list[set[int]], shares: Sequence[float]) -> None:
    """Exchange experts of the heaviest part for lighter ones of others."""
    sums = [sum(shares[expert] for expert in held) for held in contents]
    least = LEAST_GAIN * sum(sums) / len(sums)
    while True:
        heavy = max(range(len(sums)), key=lambda part: (sums[part], -part))
        for light in sorted(range(len(sums)), key=lambda part: (sums[part], part)):
            found = _best_exchange(contents[heavy], contents[light], shares, sums[heavy] - sums[light], least)
            if found is not None:
                break
        else:
            return
        given, taken = found
        for part, out, into in ((heavy, given, taken), (light, taken, given)):
            contents[part].remove(out)
            contents[part].add(into)
            sums[part] += shares[into] - shares[out]


def _best_exchange(
    heavy: set[int], light: set[int], shares: Sequence[float], difference: float, least: float
) -> tuple[int, int] | None:
    """The expert to give and the one to take so that the larger sum becomes least; None if it falls by less than
    `least`. difference: of the two sums.
    """
    takeable = sorted((shares[expert], expert) for expert in light - heavy)
    best, best_gain = None, least
    for given in sorted(heavy - light):
        # Half of the difference should go over.
        index = bisect_left(takeable, (shares[given] - difference / 2, -1))
        for share, taken in takeable[max(index - 1, 0) : index + 1]:
            moved = shares[given] - share
            gain = min(moved, difference - moved)
            if gain > best_gain:
                best, best_gain = (given, taken), gain
    return best


def _in_slots(placement: Placement, contents: Sequence[set[int]]) -> Placement:
    """Experts that a part keeps stay in their slots."""
    held: list[int] = []
    for part, wanted in enumerate(contents):
        own = placement.part(part)
        new = iter(sorted(wanted.difference(own)))
        held += [expert if expert in wanted else next(new) for expert in own]
    return Placement(tuple(held), placement.parts)
