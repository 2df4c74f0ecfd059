"""Where ranks exchange bytes over host memory: each writes, all arrive, each reads what the others wrote."""

import mmap
import time
from collections.abc import Sequence

from engine.parallel.group_memory import GroupMemory
from engine.parallel.semaphores import SEMAPHORE_BYTES, Semaphores
from mesh.errors import RankLost

# How often a rank that waits looks whether the other still lives.
LOOK_SECONDS = 0.05
# The longest wait for another rank: more than any step takes, and more than ranks differ in loading. A rank that hangs
# is noticed earlier, by its heartbeat.
LIMIT_SECONDS = 600.0
# What a rank writes for a meeting is read until it writes for the one after the next.
_BUFFERS = 2


class Meeting:
    """One rank's end. The same members meet again and again.

    It writes `slot`, then calls `arrive` and `wait`, and reads `written` of each member until it arrives again.
    """

    def __init__(
        self,
        memory: GroupMemory,
        offset: int,
        world: int,
        rank: int,
        members: Sequence[int],
        slot_bytes: int,
        limit_seconds: float = LIMIT_SECONDS,
    ) -> None:
        """offset: of the meeting's part of the memory, `region_bytes` long; members: ranks, this one among them."""
        self.members = members
        self._memory = memory
        self._world = world
        self._rank = rank
        self.others = others = [member for member in members if member != rank]
        # By other rank: the semaphore that this rank posts for it, and the one that it posts for this rank.
        self._posted = [rank * world + other for other in others]
        self._taken = {other: other * world + rank for other in others}
        self._limit_seconds = limit_seconds
        self._semaphores = Semaphores(memory.map, offset, world * world)
        slots = memoryview(memory.map)[offset + _semaphore_bytes(world) :]
        self._slots = {
            member: [slots[(_BUFFERS * member + buffer) * slot_bytes :][:slot_bytes] for buffer in range(_BUFFERS)]
            for member in members
        }
        # Meetings that this rank has arrived at.
        self._arrivals = 0

    @property
    def slot(self) -> memoryview:
        """What this rank brings to its next meeting."""
        return self._slots[self._rank][self._arrivals % _BUFFERS]

    def arrive(self) -> None:
        self._arrivals += 1
        for semaphore in self._posted:
            self._semaphores.post(semaphore)

    def wait(self) -> None:
        """Sleep until all others have arrived. Raises RankLost if one has ended, or after the limit."""
        missing = [other for other, semaphore in self._taken.items() if not self._semaphores.try_take(semaphore)]
        deadline = time.monotonic() + self._limit_seconds
        for other in missing:
            self._wait_for(other, deadline)

    def written(self, member: int) -> memoryview:
        """What a member brought to the meeting that this rank arrived at last."""
        return self._slots[member][(self._arrivals - 1) % _BUFFERS]

    def _wait_for(self, other: int, deadline: float) -> None:
        semaphore = self._taken[other]
        while not self._semaphores.take(semaphore, LOOK_SECONDS):
            # It may have arrived and ended since.
            if self._memory.has_ended(other) and not self._semaphores.try_take(semaphore):
                raise RankLost(f"rank {other} of {self._world} has ended")
            if time.monotonic() > deadline:
                raise RankLost(f"rank {other} of {self._world} has not answered for {self._limit_seconds:g} s")


def region_bytes(world: int, slot_bytes: int) -> int:
    """Size of a meeting's part of the memory, whole pages."""
    size = _semaphore_bytes(world) + _BUFFERS * world * slot_bytes
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def create_meeting(memory: mmap.mmap, offset: int, world: int) -> None:
    """Make the part of new memory ready, before any rank opens it."""
    Semaphores(memory, offset, world * world).create()


def _semaphore_bytes(world: int) -> int:
    return world * world * SEMAPHORE_BYTES
