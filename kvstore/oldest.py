"""Blocks that may give way, the least recently used first."""

import heapq
from collections.abc import Callable

# Outdated entries are kept until there are so many times as many entries as blocks.
_GROWTH = 4


class Oldest:
    """A block is added whenever it may give way. What has changed since is looked at when its turn comes."""

    def __init__(self, blocks: int, holds: Callable[[int, int], bool]) -> None:
        """blocks: how many there can be; `holds` says whether that last use of that block is still its last, and
        whether it may give way.
        """
        self._most_entries = _GROWTH * max(blocks, 1)
        self._holds = holds
        self._heap: list[tuple[int, int]] = []

    def add(self, last_used: int, block: int) -> None:
        heapq.heappush(self._heap, (last_used, block))
        if len(self._heap) > self._most_entries:
            # The same use of a block may have been added again.
            self._heap = [entry for entry in set(self._heap) if self._holds(*entry)]
            heapq.heapify(self._heap)

    def pop(self) -> int | None:
        """The next one to give way; None if none may."""
        while self._heap:
            last_used, block = heapq.heappop(self._heap)
            if self._holds(last_used, block):
                return block
        return None
