"""Counts that the processes of one gateway share: allowances of tenants, and their live generations."""

import fcntl
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap
from tempfile import TemporaryFile

KINDS = ("requests", "tokens")
# An allowance is two numbers: what is left, and when it was last filled.
NUMBERS = 2
_NEVER_FILLED = array("d", (0.0, -math.inf))


class LiveCount:
    """A tenant's live generations in all processes. Each process counts its own."""

    def __init__(self, row: "memoryview[float]", process: int) -> None:
        self._row = row
        self._process = process

    @property
    def total(self) -> int:
        return int(sum(self._row))

    def add(self, number: int) -> None:
        self._row[self._process] += number


class Ledger:
    """Numbers in memory that forked processes share; a single process has its own.

    Hold `held` while reading and changing numbers that belong together. If a process dies there, the system releases
    the lock.
    """

    def __init__(self, tenants: Sequence[str], processes: int = 1) -> None:
        # This process's number; set after the fork.
        self.process = 0
        self._places = {tenant: place for place, tenant in enumerate(tenants)}
        self._processes = processes
        # The rows of live generations follow all allowances.
        self._rows_at = len(tenants) * len(KINDS) * NUMBERS
        size = self._rows_at + len(tenants) * processes
        self._numbers = memoryview(mmap(-1, 8 * max(1, size))).cast("d")
        for place in range(0, self._rows_at, NUMBERS):
            # The first fill makes an allowance full, whatever the clock says.
            self._numbers[place : place + NUMBERS] = memoryview(_NEVER_FILLED)
        self._lock = TemporaryFile() if processes > 1 else None  # noqa: SIM115 - open for as long as the process

    @contextmanager
    def held(self) -> Iterator[None]:
        if self._lock is None:
            yield
            return
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def allowance(self, tenant: str, kind: str) -> "memoryview[float]":
        """[what is left, when it was last filled], as doubles."""
        place = (self._places[tenant] * len(KINDS) + KINDS.index(kind)) * NUMBERS
        return self._numbers[place : place + NUMBERS]

    def live(self, tenant: str) -> LiveCount:
        place = self._rows_at + self._places[tenant] * self._processes
        return LiveCount(self._numbers[place : place + self._processes], self.process)

    def forget(self, process: int) -> None:
        """Clear the generations of a process that is gone."""
        for row in range(self._rows_at, self._rows_at + len(self._places) * self._processes, self._processes):
            self._numbers[row + process] = 0.0
