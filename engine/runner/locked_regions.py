"""Which parts of some host memory are page-locked for a GPU.

They are locked as they are first read, or ahead of that once their owner has filled them: it takes as long as several
reads, and gives memory to pages that had none.
"""

from collections.abc import Callable
from threading import Lock


class LockedRegions:
    """A region is locked once, whether or not that succeeds: memory that is not locked is copied too, only slower.
    Several threads may call.
    """

    def __init__(self, size_bytes: int, lock: Callable[[int, int], object], region_bytes: int) -> None:
        """lock: takes where a region begins and its size; it must not raise."""
        self._size_bytes = size_bytes
        self._lock = lock
        self._region_bytes = region_bytes
        self._one_at_a_time = Lock()
        self._locked: set[int] = set()
        # All regions before this one are locked.
        self._first = 0

    def lock_at(self, place: int) -> None:
        """Lock the region that has this byte."""
        assert 0 <= place < self._size_bytes, "a place outside the memory"
        region = place // self._region_bytes
        if region not in self._locked:
            self._lock_region(region)

    def lock_next(self, is_filled: Callable[[int, int], bool]) -> bool:
        """Lock the first region that is not locked if it is filled, and return whether it was. is_filled: takes where a
        region begins and its size.
        """
        while self._first in self._locked:
            self._first += 1
        if self.all_locked or not is_filled(*self._place(self._first)):
            return False
        self._lock_region(self._first)
        return True

    @property
    def all_locked(self) -> bool:
        return self._first * self._region_bytes >= self._size_bytes

    def _lock_region(self, region: int) -> None:
        with self._one_at_a_time:
            if region not in self._locked:
                self._lock(*self._place(region))
                self._locked.add(region)

    def _place(self, region: int) -> tuple[int, int]:
        start = region * self._region_bytes
        return start, min(self._region_bytes, self._size_bytes - start)
