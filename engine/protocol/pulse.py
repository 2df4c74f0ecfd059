"""Proof of a rank's progress, in a page of memory that the rank shares with its service: no message, no system call."""

import mmap
import os
from typing import NamedTuple, Self

_WORDS = 4
_SIZE_BYTES = mmap.PAGESIZE


class LoopProgress(NamedTuple):
    """Counts only grow. A pass count is odd while the thread is at work, and even while it waits for work."""

    beats: int
    step_loop_passes: int
    transfer_passes: int
    # The longest step that the rank announces, in milliseconds.
    longest_step_ms: int


class Pulse:
    """The rank writes, its service reads. Each word is written whole; a reading may mix two writings."""

    def __init__(self, descriptor: int) -> None:
        """Maps the descriptor's memory, which may be closed afterwards."""
        self._words = memoryview(mmap.mmap(descriptor, _SIZE_BYTES)).cast("Q")[:_WORDS]

    @classmethod
    def create(cls) -> tuple[Self, int]:
        """A pulse, and the descriptor with which another process maps the same memory."""
        descriptor = os.memfd_create("pulse")
        os.ftruncate(descriptor, _SIZE_BYTES)
        return cls(descriptor), descriptor

    def write(self, progress: LoopProgress) -> None:
        for index, value in enumerate(progress):
            self._words[index] = value

    def read(self) -> LoopProgress:
        return LoopProgress(*self._words)
