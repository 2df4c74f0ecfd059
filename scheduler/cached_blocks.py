"""Which ranks hold which blocks, according to their workers' reports."""

from collections.abc import Collection, Sequence
from itertools import repeat

from scheduler.live_worker import Worker
from scheduler.prefix_index import Holders, PrefixIndex


class CachedBlocks:
    """Keeps every worker's `Worker.cached` consistent with the common index; nothing else writes either.

    The entries are only hints: a limit bounds those of all workers together, and entries beyond it are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = 0
        self._prefixes = PrefixIndex()

    def record(
        self,
        worker: Worker,
        snapshot: bool,
        stored: Sequence[bytes],
        removed: Collection[bytes],
        holders: Sequence[int] = (),
    ) -> None:
        """Record the blocks that a worker stored and removed; a snapshot replaces all earlier reports.

        holders: if the worker has several ranks, a bit mask for each of `stored` of the ranks that hold it.
        """
        before = len(worker.cached)
        if snapshot:
            self._forget(worker, list(worker.cached))
        self._forget(worker, removed)
        room = min(self._limit - self._kept + before, worker.identity.total_blocks)
        for block_hash, ranks in zip(stored, holders or repeat(1, len(stored)), strict=True):
            if block_hash in worker.cached:
                self._forget(worker, [block_hash])
            elif len(worker.cached) >= room:
                break
            worker.cached[block_hash] = ranks
            for rank in worker.held_by(ranks):
                self._prefixes.add(rank.number, block_hash)
        self._kept += len(worker.cached) - before

    def holders(self, block_hashes: Sequence[bytes]) -> Holders:
        """Which ranks hold which part of a chain now."""
        return self._prefixes.holders(block_hashes)

    def remove(self, worker: Worker) -> None:
        """Forget a worker that is gone, with all its blocks."""
        self._kept -= len(worker.cached)
        for rank in worker.ranks:
            self._prefixes.remove(rank.number, worker.cached)

    def _forget(self, worker: Worker, block_hashes: Collection[bytes]) -> None:
        for block_hash in block_hashes:
            for rank in worker.held_by(worker.cached.pop(block_hash, 0)):
                self._prefixes.remove(rank.number, [block_hash])
