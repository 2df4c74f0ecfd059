"""Where ranks show one another a few numbers before each step, over host memory.

A rank that comes last reads what the others have written, and goes on: no system call, and as little Python as can be,
because all of it has left the processor's caches since the step before. A rank that has to wait looks for a moment
whether the others come, then it sleeps.
"""

import mmap
import struct
import time
from collections.abc import Callable

from engine.parallel.group_memory import GroupMemory
from engine.parallel.meeting import LOOK_SECONDS
from engine.parallel.semaphores import SEMAPHORE_BYTES, Semaphores
from mesh.errors import RankLost

# Ranks that compute a step together are done with it at about the same time. To sleep and be woken takes as long.
SPIN_SECONDS = 100e-6
# Whole cache lines.
RECORD_BYTES = 256
# A record is read until its rank writes the one after the next.
_BUFFERS = 2
# Native size: each word is written and read at once.
_WORD = struct.Struct("q")
# What a rank does until it brings its record; what it does behind that is 0, or `_asleep`.
_RESTS = -1

Record = tuple[int, ...]


class Board:
    """The ranks of a host bring a record to every round, equally many numbers each. One rank's end of it.

    Words before a record say what its rank does, and which round it is of; its hash behind it tells that all of it is
    there, in whatever order a processor shows what another wrote. A rank that rests brings nothing until somebody wakes
    it. One that sleeps waits for another's record, and that one posts its semaphore. It says so before it looks for the
    last time; if the other reads that too early even so, it looks again after LOOK_SECONDS.

    Attributes:
        rank: this one, among the ranks of its host.
    """

    def __init__(
        self, memory: GroupMemory, offset: int, world: int, rank: int, numbers: int, limit_seconds: float
    ) -> None:
        """offset: of the board's part of the memory, `board_bytes` long; numbers: of a record."""
        layout = struct.Struct(f"{3 + numbers}q")
        assert layout.size <= RECORD_BYTES
        self.rank = rank
        self._memory = memory
        self._map = memory.map
        self._world = world
        self._limit_seconds = limit_seconds
        self._semaphores = Semaphores(memory.map, offset, world)
        self._pack_into, self._unpack_from = layout.pack_into, layout.unpack_from
        self._waits_for_own = _asleep(rank)
        first = offset + world * SEMAPHORE_BYTES
        places = [[first + (_BUFFERS * member + buffer) * RECORD_BYTES for member in range(world)] for buffer in (0, 1)]
        # By buffer: where this rank's record is, and the others', with their ranks.
        self._places = [(each[rank], [pair for pair in enumerate(each) if pair[0] != rank]) for each in places]
        # The last round to which this rank has brought a record.
        self._round = 0

    @property
    def due(self) -> bool:
        """Whether another rank has come to the next round. If not, this one may rest until it is woken."""
        number = self._round + 1
        own, others = self._places[number % _BUFFERS]
        if any(self._read(number, place) is not None for _, place in others):
            return True
        _WORD.pack_into(self._map, own, _RESTS)
        # Who came before it could read that wakes nobody.
        return any(self._read(number, place) is not None for _, place in others)

    def bring(self, record: Record, wake: Callable[[], None]) -> list[Record]:
        """Bring this rank's record, and return the others', in the order of their ranks, once they are there.

        wake: called if another rank rests. Raises RankLost if one has ended, or after the limit.
        """
        self._round = number = self._round + 1
        own, others = self._places[number % _BUFFERS]
        self._pack_into(self._map, own, 0, number, *record, hash(record))
        brought = []
        for rank, place in others:
            found = self._unpack_from(self._map, place)
            theirs = found[2:-1]
            if found[1] != number or found[-1] != hash(theirs):
                theirs = self._await(number, rank, place, wake)
            elif found[0] == self._waits_for_own:
                self._semaphores.post(rank)
            brought.append(theirs)
        return brought

    def _read(self, number: int, place: int) -> Record | None:
        """The record of this round; None if it is not there, or not all of it."""
        found = self._unpack_from(self._map, place)
        record = found[2:-1]
        return record if found[1] == number and found[-1] == hash(record) else None

    def _await(self, number: int, rank: int, place: int, wake: Callable[[], None]) -> Record:
        """The record of another rank, once it is there."""
        self._wake_rested(place, wake)
        until = time.perf_counter() + SPIN_SECONDS
        while time.perf_counter() < until:
            if (found := self._read(number, place)) is not None:
                return found
        own, _ = self._places[number % _BUFFERS]
        _WORD.pack_into(self._map, own, _asleep(rank))
        deadline = time.monotonic() + self._limit_seconds
        while (found := self._read(number, place)) is None:
            # It may have brought its record and ended since.
            if self._memory.has_ended(rank) and self._read(number, place) is None:
                raise RankLost(f"rank {rank} of {self._world} has ended")
            if time.monotonic() > deadline:
                raise RankLost(f"rank {rank} of {self._world} has not answered for {self._limit_seconds:g} s")
            self._wake_rested(place, wake)
            self._semaphores.take(self.rank, LOOK_SECONDS)
        return found

    def _wake_rested(self, place: int, wake: Callable[[], None]) -> None:
        (does,) = _WORD.unpack_from(self._map, place)
        if does == _RESTS:
            wake()


def board_bytes(world: int) -> int:
    """Size of a board's part of the memory, whole pages."""
    size = world * (SEMAPHORE_BYTES + _BUFFERS * RECORD_BYTES)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def create_board(memory: mmap.mmap, offset: int, world: int) -> None:
    """Make the part of new memory ready, before any rank opens it."""
    Semaphores(memory, offset, world).create()


def _asleep(rank: int) -> int:
    """Says that a rank sleeps until this one brings its record."""
    return 1 + rank
