"""Which expert each slot holds. Pure.

A part of the experts is a row of equally many slots, and ranks are divided into equally many parts. An expert may have
several slots, on different parts: copies, which divide its tokens among them. Parts of one host lie next to each other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np
import numpy.typing as npt

# Experts are exchanged only if that lowers the larger load by more than this share of the mean load.
LEAST_GAIN = 0.005
# The same for groups of experts and hosts. A group's experts, 32 of R1's, travel between hosts one after another.
LEAST_GROUP_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """experts: by slot, the expert that it holds; slots of a part lie next to each other."""

    experts: tuple[int, ...]
    parts: int

    def __post_init__(self) -> None:
        assert len(self.experts) % self.parts == 0

    @property
    def slots(self) -> int:
        """Slots of each part."""
        return len(self.experts) // self.parts

    def part(self, index: int) -> tuple[int, ...]:
        """What the slots of a part hold."""
        return self.experts[index * self.slots : (index + 1) * self.slots]


@dataclass(frozen=True, slots=True)
class Grouping:
    """Each host holds equally many groups of neighbouring experts, with all of their copies. So a token, whose experts
    are all of a few groups, goes to few hosts.
    """

    hosts: int = 1
    groups: int = 1


# Experts and copies lie on any host.
ANYWHERE = Grouping()


def slots_of(experts: int, parts: int, redundant: int) -> int:
    """Slots of each part: for its share of the experts, rounded up, and for `redundant` copies of others."""
    return -(-experts // parts) + redundant


def first_placement(experts: int, parts: int, redundant: int, grouping: Grouping = ANYWHERE) -> ExpertPlacement:
    """The experts in order, from each part's share on; what is left of its slots has copies of the next part's first
    experts, on each host of its own.
    """
    slots = slots_of(experts, parts, redundant)
    parts_a_host, experts_a_host = parts // grouping.hosts, experts // grouping.hosts
    assert parts % grouping.hosts == 0 and slots <= experts_a_host
    held = [
        host * experts_a_host + (part * experts_a_host // parts_a_host + slot) % experts_a_host
        for host in range(grouping.hosts)
        for part in range(parts_a_host)
        for slot in range(slots)
    ]
    return ExpertPlacement(tuple(held), parts)


def imbalances(held: npt.NDArray[np.int64], parts: int, loads: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """(largest - mean) / mean of the parts' loads, by layer; 0 without load.

    held: [layers, slots], which expert each slot holds; loads: [layers, experts], divided evenly among copies.
    """
    layers, slots = held.shape
    experts = loads.shape[1]
    of_slots = (held + experts * np.arange(layers)[:, None]).ravel()
    shares = loads.ravel() / np.bincount(of_slots, minlength=loads.size)
    # Sums one by one, as `cumsum` makes them, are the same on other kinds of CPUs, where ranks decide alike.
    by_part = shares[of_slots].reshape(layers, parts, slots // parts).cumsum(2)[:, :, -1]
    mean = by_part.cumsum(1)[:, -1] / parts
    found = np.zeros(layers)
    np.divide(by_part.max(1) - mean, mean, out=found, where=mean > 0)
    return found


def imbalance(placement: ExpertPlacement, loads: Sequence[float] | npt.NDArray[np.float64]) -> float:
    """`imbalances` of one layer. loads: by expert."""
    return float(imbalances(np.array([placement.experts]), placement.parts, np.array([loads], np.float64))[0])


def balancing(
    placement: ExpertPlacement, loads: Sequence[float] | npt.NDArray[np.float64], grouping: Grouping = ANYWHERE
) -> Iterator[ExpertPlacement | None]:
    """Yields at last a placement with the same slots, near the given one, whose parts have loads as even as possible.

    Before that it yields None after each piece of the work, some 20 us of a host's time: steps of a model wait for it.

    Hierarchical as EPLB is (DeepSeek, 2025, `rebalance_experts_hierarchical`): groups of experts are shared out to
    hosts, then each host's experts get copies, which are shared out to its parts. Copies are counted as EPLB does:
    spare slots go, one after another, to the expert with the largest load a copy. Then, in place of EPLB's packing from
    nothing, which would move nearly all: copies that are too many make room for those that lack, on the part with the
    least load, and experts of the heaviest part change places with others for as long as that lowers its load. Groups
    change hosts in the same way.
    """
    each = np.array(loads, np.float64)
    # [parts, experts]: which part holds which expert.
    holds = np.zeros((placement.parts, len(each)), np.bool_)
    holds[np.arange(len(placement.experts)) // placement.slots, placement.experts] = True
    on_hosts = _groups_on_hosts(holds, grouping)
    for _ in _even_out(on_hosts, each.reshape(grouping.groups, -1).cumsum(1)[:, -1], LEAST_GROUP_GAIN):
        yield None
    for on_host, parts in zip(on_hosts, np.split(holds, grouping.hosts), strict=True):
        own = np.repeat(on_host, len(each) // grouping.groups)
        counts = np.zeros(len(each), np.int64)
        counts[own] = _copies(each[own].tolist(), len(parts) * placement.slots, len(parts))
        yield None
        # Experts of other hosts have no copy here, and no load.
        shares = np.divide(each, counts, out=np.zeros_like(each), where=own)
        # `parts` are rows of `holds`, which these change.
        for pieces in (_recount(parts, counts, shares), _even_out(parts, shares, LEAST_GAIN)):
            for _ in pieces:
                yield None
    yield _in_slots(placement, holds)


def _groups_on_hosts(holds: npt.NDArray[np.bool_], grouping: Grouping) -> npt.NDArray[np.bool_]:
    """[hosts, groups]: the groups of each host. A placement that is not so divided counts as if its experts lay in
    order. holds: [parts, experts].
    """
    hosts, groups = grouping.hosts, grouping.groups
    found: npt.NDArray[np.bool_] = holds.reshape(hosts, len(holds) // hosts, groups, -1).sum((1, 3)) > 0
    if (found.sum(0) == 1).all() and (found.sum(1) == groups // hosts).all():
        return found
    return np.repeat(np.eye(hosts, dtype=np.bool_), groups // hosts, axis=1)


def _copies(loads: Sequence[float], slots: int, parts: int) -> npt.NDArray[np.int64]:
    """[experts]: how many slots each expert gets, at most one a part."""
    counts = [1] * len(loads)
    # The expert with the largest load a copy first, of equal ones the first.
    waiting = [(-load, expert) for expert, load in enumerate(loads)]
    heapify(waiting)
    for _ in range(slots - len(loads)):
        expert = waiting[0][1]
        counts[expert] += 1
        if counts[expert] < parts:
            heapreplace(waiting, (-loads[expert] / counts[expert], expert))
        else:
            heappop(waiting)
    return np.array(counts)


def _recount(
    holds: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64], shares: npt.NDArray[np.float64]
) -> Iterator[None]:
    """Give each expert as many copies as it should have; every part keeps its number of slots. Changes `holds`, and
    yields after each piece of work: one expert loses copies or gets one.
    """
    sizes = holds.sum(1)
    free = np.zeros_like(sizes)
    sums = _sums(holds, shares)
    found = holds.sum(0)
    for expert in np.flatnonzero(found > counts):
        (holders,) = holds[:, expert].nonzero()
        losing = holders[np.argsort(-sums[holders], kind="stable")][: found[expert] - counts[expert]]
        holds[losing, expert] = False
        sums[losing] -= shares[expert]
        free[losing] += 1
        yield
    for expert in sorted(np.flatnonzero(found < counts), key=lambda expert: (-shares[expert], expert)):
        for _ in range(counts[expert] - found[expert]):
            lacking = ~holds[:, expert]
            (roomy,) = (lacking & (free > 0)).nonzero()
            if len(roomy):
                part = roomy[sums[roomy].argmin()]
                free[part] -= 1
            else:
                # All parts with room hold it already: one of them takes another expert from a part that does not hold
                # it.
                (able,) = lacking.nonzero()
                part, taker = able[sums[able].argmin()], (free > 0).argmax()
                (movable,) = (holds[part] & ~holds[taker]).nonzero()
                moved = movable[shares[movable].argmin()]
                holds[part, moved], holds[taker, moved] = False, True
                sums[part] -= shares[moved]
                sums[taker] += shares[moved]
                free[taker] -= 1
            holds[part, expert] = True
            sums[part] += shares[expert]
            yield


def _even_out(holds: npt.NDArray[np.bool_], shares: npt.NDArray[np.float64], least_gain: float) -> Iterator[None]:
    """Exchange experts of the heaviest part for lighter ones. Changes `holds`; yields after comparing two parts.

    least_gain: of an exchange, as a share of the parts' mean load.
    """
    sums = _sums(holds, shares)
    least = least_gain * sums.sum() / len(sums)
    while True:
        heavy = sums.argmax()
        for light in np.argsort(sums, kind="stable"):
            found = _best_exchange(holds[heavy], holds[light], shares, sums[heavy] - sums[light], least)
            yield
            if found is not None:
                break
        else:
            return
        given, taken = found
        holds[heavy, [given, taken]] = False, True
        holds[light, [given, taken]] = True, False
        moved = shares[given] - shares[taken]
        sums[heavy] -= moved
        sums[light] += moved


def _best_exchange(
    heavy: npt.NDArray[np.bool_],
    light: npt.NDArray[np.bool_],
    shares: npt.NDArray[np.float64],
    difference: float,
    least: float,
) -> tuple[int, int] | None:
    """The expert to give and the one to take so that the larger sum falls most; None if it falls by no more than
    `least`. heavy and light: [experts], what two parts hold; difference: of the two sums.
    """
    # No exchange lowers the larger sum by more than half of the difference.
    if difference <= 2 * least:
        return None
    (givable,), (takeable,) = (heavy & ~light).nonzero(), (light & ~heavy).nonzero()
    if not len(givable) or not len(takeable):
        return None
    takeable = takeable[shares[takeable].argsort(kind="stable")]
    # Half of the difference should go over, so only the two shares around what remains to be taken come into question.
    above = shares[takeable].searchsorted(shares[givable] - difference / 2)
    nearest = np.array([above - 1, above]).clip(0, len(takeable) - 1)
    moved = shares[givable] - shares[takeable[nearest]]
    gains = np.minimum(moved, difference - moved)
    side, given = divmod(int(gains.argmax()), len(givable))
    if gains[side, given] <= least:
        return None
    return int(givable[given]), int(takeable[nearest[side, given]])


def _sums(holds: npt.NDArray[np.bool_], shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[parts]: their loads, added one by one as in `imbalances`."""
    sums: npt.NDArray[np.float64] = (holds * shares).cumsum(1)[:, -1]
    return sums


def _in_slots(placement: ExpertPlacement, holds: npt.NDArray[np.bool_]) -> ExpertPlacement:
    """The placement that `holds` says. Experts that a part keeps stay in their slots."""
    held: list[int] = []
    for part, wanted in enumerate(holds):
        own = placement.part(part)
        new = iter(sorted(set(wanted.nonzero()[0].tolist()).difference(own)))
        held += [expert if wanted[expert] else next(new) for expert in own]
    return ExpertPlacement(tuple(held), placement.parts)
