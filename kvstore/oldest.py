"""A queue of evictable blocks, the least recently used first."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

# Outdated entries are removed once there are this many times as many entries as the last removal left, unless there are
# only a few.
_GROWTH = 4
_FEW = 256

BlockT = TypeVar("BlockT", int, bytes)


class Oldest(Generic[BlockT]):
    """Add a block whenever it becomes evictable. Later changes are checked only when its turn comes."""

    def __init__(self, holds: Callable[[int, BlockT], bool]) -> None:
        """`holds`: whether the given use is still the block's last, and the block is still evictable."""
        self._most_entries = _FEW
        self._holds: Callable[[int, BlockT], bool] = holds
        self._heap: list[tuple[int, BlockT]] = []

    def add(self, last_used: int, block: BlockT) -> None:
        heapq.heappush(self._heap, (last_used, block))
        if len(self._heap) > self._most_entries:
            # The same use of a block may have been added twice.
            self._heap = [entry for entry in set(self._heap) if self._holds(*entry)]
            heapq.heapify(self._heap)
            self._most_entries = max(_FEW, _GROWTH * len(self._heap))

    def pop(self) -> BlockT | None:
        """The next block to evict; None if there is none."""
        while self._heap:
            last_used, block = heapq.heappop(self._heap)
            if self._holds(last_used, block):
                return block
        return None
