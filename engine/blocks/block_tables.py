"""The blocks that requests hold, and which of them other requests may share.

A prefix is looked for in the pool first, and in host memory from where the pool's part ends.
"""

from collections.abc import Sequence

from engine.blocks.host_blocks import HostBlocks
from engine.blocks.kv_pool import BlockPool
from engine.requests.request import Request
from mesh.blocks import BLOCK_TOKENS, blocks_for


class BlockTables:
    """Takes blocks from the pool for requests and gives them back; each request's table is in its `progress`."""

    def __init__(self, pool: BlockPool, prefix_cache: bool, host: HostBlocks | None = None) -> None:
        """host: the blocks in host memory; None if none are kept there."""
        self._pool = pool
        self._host = host
        self._prefix_cache = prefix_cache

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix, without the block of the last token. Holds none of them."""
        if not self._takes_cached(request):
            return []
        return self._pool.match_prefix(request.full_block_hashes(request.matchable_blocks))

    def match_host(self, request: Request, cached: Sequence[int]) -> list[bytes]:
        """The contents after the cached blocks that are in host memory. Pins none of them."""
        if self._host is None or not self._takes_cached(request):
            return []
        return self._host.match_prefix(request.full_block_hashes(request.matchable_blocks)[len(cached) :])

    def could_share(self, request: Request, cached: Sequence[int]) -> bool:
        """Whether the request could take the block after the cached ones from the pool too, were it there."""
        return self._takes_cached(request) and len(cached) < request.matchable_blocks

    def _takes_cached(self, request: Request) -> bool:
        # Tokens that are not computed have no logits, and so no scores.
        return self._prefix_cache and request.prompt_scores is None

    def hold(self, cached: Sequence[int], hosted: Sequence[bytes]) -> None:
        """Keep a matched prefix from being evicted: blocks of the pool, and contents of host memory until they are
        read.
        """
        self._pool.acquire(cached)
        if self._host is not None:
            self._host.pin(hosted)

    def fill(self, request: Request, cached: Sequence[int], hosted: Sequence[bytes] = ()) -> None:
        """Give a request without blocks its table: `cached`, then new blocks, the first of them for `hosted`. Both are
        held for it already.
        """
        request.progress.matched(cached, self._pool.allocate(self.lacking(request, cached)))
        drafts_end = self._pool.drafts_end(cached)
        if drafts_end is None and hosted and self._host is not None:
            in_hosted = self._host.draftless_from(hosted)
            drafts_end = None if in_hosted is None else len(cached) + in_hosted
        if drafts_end is not None:
            request.progress.lack_drafts(drafts_end)

    def lacking(self, request: Request, cached: Sequence[int]) -> int:
        """How many blocks a request without any needs in addition to the cached ones."""
        return blocks_for(request.reach(len(request.progress.token_ids))) - len(cached)

    def grow(self, requests: Sequence[Request]) -> None:
        """Add one block to each, for the tokens that it generates."""
        for request, block in zip(requests, self._pool.allocate(len(requests)), strict=True):
            request.progress.grown([block])

    def register(self, request: Request) -> None:
        """Make the request's full blocks known to others, if they may share them."""
        progress = request.progress
        # `computed` leaves out known tokens that are computed again.
        full_blocks = max(max(progress.computed, progress.known) // BLOCK_TOKENS, progress.registered_blocks)
        if self._prefix_cache:
            hashes = request.full_block_hashes(full_blocks)
            whole = full_blocks if progress.drafts_end is None else progress.drafts_end
            for index in range(progress.registered_blocks, full_blocks):
                parent = hashes[index - 1] if index else b""
                self._pool.register(
                    progress.block_ids[index], hashes[index], parent, index >= whole, request.share.tenant, index
                )
        progress.registered(full_blocks)

    def release(self, request: Request) -> None:
        """Give back all of the request's blocks; what is registered can still be found."""
        self._pool.release(request.progress.block_ids)
        request.progress.reset()
