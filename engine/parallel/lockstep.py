"""Agreement of ranks over host memory: no collective of the device, and no time of it.

The rank that proposes last reads what the others have written, and goes on. It makes no system call, and runs as little
Python in as few functions and libraries as possible, because their code has left the processor's caches since the last
step. A rank that has to wait spins for a moment, then sleeps.
"""

import mmap
import time
from collections.abc import Callable

from engine.parallel.group_memory import GroupMemory
from engine.parallel.meeting import LOOK_SECONDS
from engine.parallel.semaphores import SEMAPHORE_BYTES, Semaphores
from engine.step.agreement import PACKED_BITS, agreed, packed
from engine.step.shape import StepShape
from mesh.errors import RankLost

# Ranks that compute a step together finish it at about the same time. Sleeping and being woken takes about this long.
SPIN_SECONDS = 100e-6
# Two words, in cache lines of their own.
_PLACE_BYTES = 128
_WORD_BYTES = 8
# A proposal is read until its rank writes the one after the next.
_BUFFERS = 2
# The bit above a proposal and the bit of its round: the rank sleeps, or rests.
_IDLE = 2


class Lockstep:
    """An `engine.step.agreement.Agreement` of the ranks of a host: in every round each writes a word. One rank's end.

    The word is a packed proposal, written and read in one access. One bit above the proposal tells its round from the
    round before the last, which uses the same place; the next bit says that the rank is idle. An idle rank that has
    proposed sleeps: the next word names the rank that it waits for, which posts the sleeper's semaphore when it
    proposes. An idle rank that has not proposed rests until another rank wakes it.

    Attributes:
        rank: this one, among the ranks of its host.
    """

    def __init__(
        self,
        memory: GroupMemory,
        offset: int,
        world: int,
        rank: int,
        wake: Callable[[], None],
        limit_seconds: float,
    ) -> None:
        """offset: of this part of the memory, `lockstep_bytes` long; wake: wakes other ranks, in case they rest."""
        self.rank = rank
        self._memory = memory
        self._words = memoryview(memory.map).cast("Q")
        self._world = world
        self._wake = wake
        self._limit_seconds = limit_seconds
        self._semaphores = Semaphores(memory.map, offset, world)
        first = offset + world * SEMAPHORE_BYTES
        places = [
            [(first + (_BUFFERS * member + buffer) * _PLACE_BYTES) // _WORD_BYTES for member in range(world)]
            for buffer in (0, 1, 0, 1)
        ]
        # By the number of a round modulo 4: its bit, where this rank's word is, and the others' ranks and places. The
        # first two rounds have bit 1, so that zeros of new memory are no proposals.
        self._rounds = [
            (bit, each[rank], [pair for pair in enumerate(each) if pair[0] != rank])
            for bit, each in zip((0, 1, 1, 0), places, strict=True)
        ]
        # The last round in which this rank has proposed, what, and packed: most steps are like the one before.
        self._round = 0
        self._proposed: StepShape | None = None
        self._packed = 0

    @property
    def due(self) -> bool:
        bit, own, others = self._rounds[self._round + 1 & 3]
        if any(self._read(bit, place) is not None for _, place in others):
            return True
        self._words[own] = (bit ^ 1 | _IDLE) << PACKED_BITS
        # Looks again, since a rank that proposed before it could read this word does not wake this rank.
        return any(self._read(bit, place) is not None for _, place in others)

    def agree(self, proposal: StepShape) -> StepShape:
        """Raises RankLost if a rank has ended, or after the limit."""
        self._round = number = self._round + 1
        bit, own, others = self._rounds[number & 3]
        words = self._words
        if proposal != self._proposed:
            self._proposed, self._packed = proposal, packed(proposal)
        words[own] = written = bit << PACKED_BITS | self._packed
        for rank, place in others:
            word = words[place]
            if word >> PACKED_BITS != bit:
                # The other rank has not proposed yet, or sleeps.
                if word >> PACKED_BITS != bit | _IDLE:
                    word = self._await(bit, rank, place)
                elif words[place + 1] == self.rank:
                    self._semaphores.post(rank)
            # The same proposal adds nothing but its counts of ranks.
            if word != written or proposal.waiting_prompts or proposal.dividing:
                proposal = agreed(proposal, word)
        return proposal

    def _read(self, bit: int, place: int) -> int | None:
        """The word of this round; None if it is not there."""
        word = self._words[place]
        return word if word >> PACKED_BITS & 1 == bit else None

    def _await(self, bit: int, rank: int, place: int) -> int:
        """Wait for the word of another rank."""
        self._wake_rested(bit, place)
        until = time.perf_counter() + SPIN_SECONDS
        while time.perf_counter() < until:
            if (found := self._read(bit, place)) is not None:
                return found
        _, own, _ = self._rounds[self._round & 3]
        awake = self._words[own]
        self._words[own + 1] = rank
        self._words[own] = awake | _IDLE << PACKED_BITS
        found = self._sleep(bit, rank, place)
        # In the round after the next both bits would mean that this rank rests.
        self._words[own] = awake
        return found

    def _sleep(self, bit: int, rank: int, place: int) -> int:
        deadline = time.monotonic() + self._limit_seconds
        while True:
            # Asked before the word is read, because the rank may propose and then end. This system call also takes long
            # enough for the word of a rank that has just read this one as awake to become visible.
            ended = self._memory.has_ended(rank)
            if (found := self._read(bit, place)) is not None:
                return found
            if ended:
                raise RankLost(f"rank {rank} of {self._world} has ended")
            if time.monotonic() > deadline:
                raise RankLost(f"rank {rank} of {self._world} has not answered for {self._limit_seconds:g} s")
            self._wake_rested(bit, place)
            self._semaphores.take(self.rank, LOOK_SECONDS)

    def _wake_rested(self, bit: int, place: int) -> None:
        if self._words[place] >> PACKED_BITS == bit ^ 1 | _IDLE:
            self._wake()


def lockstep_bytes(world: int) -> int:
    """Size of a lockstep's part of the memory, whole pages."""
    size = world * (SEMAPHORE_BYTES + _BUFFERS * _PLACE_BYTES)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def create_lockstep(memory: mmap.mmap, offset: int, world: int) -> None:
    """Make the part of new memory ready, before any rank opens it."""
    Semaphores(memory, offset, world).create()
