"""No rank overwrites what another has not read: the turns of `peer_exchange/cuda/peers.cuh`, threads in any order.

A model of one channel: threads of each rank that run until they wait, a warp that hands slots over, and kernels that
begin when the rank's earlier one has ended.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest

from kernels.peer_exchange.region import LAG, LINE_TURNS, SLOT_TURNS, WORD_TURNS

THREADS = 2
SCHEDULES = 40
Wait = Callable[[], bool]


@dataclass
class Channel:
    ranks: int
    places: dict[str, int]
    # By kind, receiver, sender, thread and place: the turn that was sent and not read.
    sent: dict[tuple[str, int, int, int, int], int] = field(default_factory=dict)
    # The turn up to which a rank has handed over its slots.
    handed: Counter[int] = field(default_factory=Counter)
    # By rank and turn: threads that have filled their slots; by rank and kernel: threads that have ended it.
    filled: Counter[tuple[int, int]] = field(default_factory=Counter)
    ended: Counter[tuple[int, int]] = field(default_factory=Counter)

    def send(self, kind: str, rank: int, thread: int, turn: int) -> None:
        for receiver in self._others(rank):
            place = (kind, receiver, rank, thread, turn % self.places[kind])
            assert place not in self.sent, f"turn {self.sent[place]} is unread, and {turn} comes"
            self.sent[place] = turn

    def has_come(self, kind: str, rank: int, thread: int, turn: int) -> bool:
        places = [(kind, rank, sender, thread, turn % self.places[kind]) for sender in self._others(rank)]
        return all(self.sent.get(place) == turn for place in places)

    def read(self, kind: str, rank: int, thread: int, turn: int) -> None:
        for sender in self._others(rank):
            assert self.sent.pop((kind, rank, sender, thread, turn % self.places[kind])) == turn

    def are_filled(self, rank: int, turn: int) -> bool:
        return self.filled[rank, turn] == THREADS

    def has_ended(self, rank: int, kernel: int) -> bool:
        return kernel < 0 or self.ended[rank, kernel] == THREADS

    def are_handed(self, rank: int, turn: int) -> bool:
        return all(self.handed[sender] >= turn for sender in self._others(rank))

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self.ranks) if other != rank]


def thread_of(channel: Channel, rank: int, thread: int, kernels: list[tuple[str, int]]) -> Iterator[Wait]:
    """kernels: the way each sends, and its turns."""
    turn = 0
    for number, (kind, turns) in enumerate(kernels):
        yield partial(channel.has_ended, rank, number - 1)
        if kind == "slots":
            for step in range(1, turns + LAG + 1):
                if step <= turns:
                    channel.send(kind, rank, thread, turn + step)
                    channel.filled[rank, turn + step] += 1
                if step > LAG:
                    yield partial(channel.are_handed, rank, turn + step - LAG)
                    channel.read(kind, rank, thread, turn + step - LAG)
        else:
            for step in range(1, turns + 1):
                channel.send(kind, rank, thread, turn + step)
                yield partial(channel.has_come, kind, rank, thread, turn + step)
                channel.read(kind, rank, thread, turn + step)
        turn += turns
        channel.ended[rank, number] += 1


def teller_of(channel: Channel, rank: int, kernels: list[tuple[str, int]]) -> Iterator[Wait]:
    """The warp that hands slots over."""
    turn = 0
    for kind, turns in kernels:
        for step in range(1, turns + 1):
            if kind == "slots":
                yield partial(channel.are_filled, rank, turn + step)
                channel.handed[rank] = turn + step
        turn += turns


def run(seed: int, places: dict[str, int], kinds: list[str]) -> None:
    """Raises AssertionError if a place is written over, or if all wait."""
    drawn = random.Random(seed)
    turns = {"lines": [1], "words": [1, 2], "slots": [1, 2, 12]}
    kernels = [(kind := drawn.choice(kinds), drawn.choice(turns[kind])) for _ in range(12)]
    channel = Channel(drawn.choice((2, 3)), places)
    running = [thread_of(channel, rank, each, kernels) for rank in range(channel.ranks) for each in range(THREADS)]
    running += [teller_of(channel, rank, kernels) for rank in range(channel.ranks)]
    waits: list[Wait | None] = [next(each, None) for each in running]
    # Some threads stay far ahead of others.
    eagerness = [drawn.random() for _ in running]
    for step in count():
        ready = [index for index, wait in enumerate(waits) if wait is not None and wait()]
        if not ready:
            break
        if step % 40 == 0:
            eagerness = [drawn.random() for _ in running]
        index = max(ready, key=eagerness.__getitem__)
        waits[index] = next(running[index], None)
    assert all(wait is None for wait in waits), "all wait"


PLACES = {"lines": LINE_TURNS, "words": WORD_TURNS, "slots": SLOT_TURNS}


@pytest.mark.parametrize("kinds", [["lines"], ["words"], ["slots"], ["lines", "words", "slots"]], ids=str)
def test_a_place_is_read_before_it_is_used_again(kinds: list[str]) -> None:
    for seed in range(SCHEDULES):
        run(seed, PLACES, kinds)


@pytest.mark.parametrize(("kind", "fewer"), [("lines", LINE_TURNS - 1), ("slots", SLOT_TURNS - 1)])
def test_with_one_place_fewer_something_unread_is_written_over(kind: str, fewer: int) -> None:
    with pytest.raises(AssertionError, match="is unread"):
        for seed in range(50 * SCHEDULES):
            run(seed, PLACES | {kind: fewer}, [kind])
