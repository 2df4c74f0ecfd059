"""Which parts of some host memory are page-locked for a GPU.

They are locked as they are first read: it takes as long as several reads, and gives memory to pages that had none.
"""

from collections.abc import Callable


class LockedRegions:
    """A region is locked once, whether or not that succeeds: memory that is not locked is copied too, only slower."""

    def __init__(self, size_bytes: int, lock: Callable[[int, int], object], region_bytes: int) -> None:
        """lock: takes where a region begins and its size; it must not raise."""
        self._size_bytes = size_bytes
        self._lock = lock
        self._region_bytes = region_bytes
        self._locked: set[int] = set()

    def lock_at(self, place: int) -> None:
        """Lock the region that has this byte."""
        assert 0 <= place < self._size_bytes, "a place outside the memory"
        region = place // self._region_bytes
        if region not in self._locked:
            self._locked.add(region)
            start = region * self._region_bytes
            self._lock(start, min(self._region_bytes, self._size_bytes - start))
