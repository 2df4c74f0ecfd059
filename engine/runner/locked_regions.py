"""Which parts of some host memory are page-locked for a GPU.

They are locked as they are first read: it takes as long as several reads, and gives memory to pages that had none.
"""

from collections.abc import Callable, Iterator

from transfer.memory import Run


class LockedRegions:
    """A region is locked once, whether or not that succeeds: memory that is not locked is copied too, only slower."""

    def __init__(self, size_bytes: int, lock: Callable[[int, int], object], region_bytes: int) -> None:
        """lock: takes where a region begins and its size; it must not raise."""
        self._size_bytes = size_bytes
        self._lock = lock
        self._region_bytes = region_bytes
        self._locked: set[int] = set()

    def split(self, run: Run) -> Iterator[Run]:
        """The run in parts of one region each, as CUDA copies no range that lies in two. A region is locked before its
        part is given.
        """
        assert run.start >= 0 and run.start + run.size_bytes <= self._size_bytes, "a run outside the memory"
        done = 0
        while done < run.size_bytes:
            region, inside = divmod(run.start + done, self._region_bytes)
            size = min(self._region_bytes - inside, run.size_bytes - done)
            self.lock(region)
            yield Run(run.start + done, run.place + done, size)
            done += size

    def lock(self, region: int) -> None:
        if region not in self._locked:
            self._locked.add(region)
            start = region * self._region_bytes
            self._lock(start, min(self._region_bytes, self._size_bytes - start))
