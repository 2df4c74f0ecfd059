"""Which ranks hold which blocks, as far as their workers have reported."""

from collections.abc import Collection, Sequence
from itertools import repeat

from scheduler.live_worker import Worker
from scheduler.prefix_index import Holders, PrefixIndex


class CachedBlocks:
    """Keeps `Worker.cached` of every worker and the index of all in agreement; nobody else writes either.

    They are hints: at most so many are kept of all workers together, and those over the limit are forgotten.
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
        """Record the blocks that a worker stored and removed; a snapshot replaces all before.

        holders: if the worker has several ranks, those that hold each of `stored`, as bits.
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
        """Who holds which part of a chain now."""
        return self._prefixes.holders(block_hashes)

    def remove(self, worker: Worker) -> None:
        """The worker is gone, with all that it held."""
        self._kept -= len(worker.cached)
        for rank in worker.ranks:
            self._prefixes.remove(rank.number, worker.cached)

    def _forget(self, worker: Worker, block_hashes: Collection[bytes]) -> None:
        for block_hash in block_hashes:
            for rank in worker.held_by(worker.cached.pop(block_hash, 0)):
                self._prefixes.remove(rank.number, [block_hash])
