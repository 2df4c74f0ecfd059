"""Blocks that may give way, the least recently used first."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

# Outdated entries are kept until there are so many times as many entries as were left the last time, or so few.
_GROWTH = 4
_FEW = 256

BlockT = TypeVar("BlockT", int, bytes)


class Oldest(Generic[BlockT]):
    """A block is added whenever it may give way. What has changed since is looked at when its turn comes."""

    def __init__(self, holds: Callable[[int, BlockT], bool]) -> None:
        """`holds` says whether that last use of that block is still its last, and whether it may give way."""
        self._most_entries = _FEW
        self._holds: Callable[[int, BlockT], bool] = holds
        self._heap: list[tuple[int, BlockT]] = []

    def add(self, last_used: int, block: BlockT) -> None:
        heapq.heappush(self._heap, (last_used, block))
        if len(self._heap) > self._most_entries:
            # The same use of a block may have been added again.
            self._heap = [entry for entry in set(self._heap) if self._holds(*entry)]
            heapq.heapify(self._heap)
            self._most_entries = max(_FEW, _GROWTH * len(self._heap))

    def pop(self) -> BlockT | None:
        """The next one to give way; None if none may."""
        while self._heap:
            last_used, block = heapq.heappop(self._heap)
            if self._holds(last_used, block):
                return block
        return None
