"""The blocks that requests hold, and what of them others may find."""

from collections.abc import Sequence

from engine.batcher import blocks_for
from engine.kv_pool import BlockPool
from engine.request import Request
from mesh.blocks import BLOCK_TOKENS


class Holdings:
    """Writes `block_ids` and `registered_blocks` of every request, and how far a found prefix counts as computed."""

    def __init__(self, pool: BlockPool, prefix_cache: bool) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache

    def match(self, request: Request) -> list[int]:
        """Blocks of the longest prefix that is there, the block of the last token excepted. Holds none of them."""
        if not self._prefix_cache:
            return []
        return self._pool.match_prefix(request.full_block_hashes(request.matchable_blocks))

    def grow(self, request: Request) -> None:
        """One block more, for the tokens that it generates."""
        request.block_ids.extend(self._pool.allocate(1))

    def fill(self, request: Request, cached: Sequence[int]) -> None:
        """A block for every token of a request that holds none: `cached`, which are acquired already, then new ones."""
        assert not request.block_ids
        new_blocks = blocks_for(len(request.token_ids)) - len(cached)
        request.block_ids.extend([*cached, *self._pool.allocate(new_blocks)])
        request.registered_blocks = len(cached)
        request.computed = len(cached) * BLOCK_TOKENS

    def register(self, request: Request, full_blocks: int) -> None:
        """The first `full_blocks` blocks are written to their ends."""
        if self._prefix_cache:
            hashes = request.full_block_hashes(full_blocks)
            for index in range(request.registered_blocks, full_blocks):
                parent = hashes[index - 1] if index else b""
                self._pool.register(request.block_ids[index], hashes[index], parent)
        request.registered_blocks = full_blocks

    def give_up(self, request: Request) -> None:
        """All of them; what is registered can still be found."""
        self._pool.release(request.block_ids)
        request.forget_blocks()
