"""Which ranks hold which blocks, according to their workers' reports."""

from collections.abc import Collection, Sequence
from itertools import repeat

from mesh.domain.workers import MAX_RANKS, POOL_BITS
from scheduler.live_worker import Worker
from scheduler.prefix_index import Holders, PrefixIndex


class CachedBlocks:
    """Keeps every worker's `Worker.cached` and its count consistent with the common index; nothing else writes either.

    The entries are only hints: a limit bounds those of all workers together, and entries beyond it are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = 0
        self._prefixes = PrefixIndex()
        # The blocks of ranks that keep some in host memory: there, or in the pool.
        self._anywhere = PrefixIndex()

    def record(
        self,
        worker: Worker,
        snapshot: bool,
        stored: Sequence[bytes],
        removed: Collection[bytes],
        holders: Sequence[int] = (),
    ) -> None:
        """Record the blocks that a worker stored and removed; a snapshot replaces all earlier reports.

        holders: a bit mask for each of `stored` of the ranks that hold it, in the pool or in host memory (see
        `mesh.domain.workers.POOL_BITS`). Empty if the worker's only rank holds all of them in its pool.
        """
        before = len(worker.cached)
        if snapshot:
            self._forget(worker, list(worker.cached))
        self._forget(worker, removed)
        tier = worker.load.host_tier
        most = worker.identity.total_blocks + (0 if tier is None else tier.total_blocks)
        room = min(self._limit - self._kept + before, most)
        for block_hash, ranks in zip(stored, holders or repeat(1, len(stored)), strict=True):
            if block_hash in worker.cached:
                self._forget(worker, [block_hash])
            elif len(worker.cached) >= room:
                break
            worker.cached[block_hash] = ranks
            worker.pool_blocks += bool(ranks & POOL_BITS)
            for rank in worker.held_by(ranks):
                self._prefixes.add(rank.number, block_hash)
            if tier is not None:
                for rank in worker.held_by(ranks | ranks >> MAX_RANKS):
                    self._anywhere.add(rank.number, block_hash)
        self._kept += len(worker.cached) - before

    def holders(self, block_hashes: Sequence[bytes]) -> Holders:
        """Which ranks hold which part of a chain now."""
        holders = self._prefixes.holders(block_hashes)
        if self._anywhere:
            holders.anywhere = self._anywhere.holders(block_hashes)
        return holders

    def remove(self, worker: Worker) -> None:
        """Forget a worker that is gone, with all its blocks."""
        self._kept -= len(worker.cached)
        for rank in worker.ranks:
            self._prefixes.remove(rank.number, worker.cached)
            self._anywhere.remove(rank.number, worker.cached)

    def _forget(self, worker: Worker, block_hashes: Collection[bytes]) -> None:
        for block_hash in block_hashes:
            ranks = worker.cached.pop(block_hash, 0)
            worker.pool_blocks -= bool(ranks & POOL_BITS)
            for rank in worker.held_by(ranks):
                self._prefixes.remove(rank.number, [block_hash])
            if self._anywhere:
                for rank in worker.held_by(ranks | ranks >> MAX_RANKS):
                    self._anywhere.remove(rank.number, [block_hash])
