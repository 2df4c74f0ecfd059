"""Which rank of a worker a request goes to. Pure: functions of plain data."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from mesh.blocks import BLOCK_TOKENS, blocks_for, iter_chain
from mesh.domain.sparse_prefill import SparsePrefill

# A request that is already on a rank delays a new one there about as much as so many prompt tokens would: each of its
# steps computes a token for it and reads its KV.
TOKENS_A_REQUEST = 64


@dataclass(frozen=True, slots=True)
class RankOutlook:
    """What a new request would find on one rank."""

    live_requests: int
    # Prompt tokens that the rank has accepted and not computed.
    queued_tokens: int
    # Blocks that no live request holds.
    free_blocks: int
    # Leading blocks of the new request's prompt that the rank holds.
    cached_blocks: int


def choose_rank(ranks: Sequence[RankOutlook], prompt_tokens: int, computes_prompt: bool, requests_a_rank: int) -> int:
    """Index of the rank with room and the least predicted work, the request's own included.

    A rank has room where the request would run at once: at most `requests_a_rank` run together, in free blocks. Of
    equals the one with most of the prefix is chosen, then the first. `computes_prompt` is False for a prompt whose KV
    comes from another worker.
    """

    def cost(index: int) -> tuple[bool, int, int, int]:
        rank = ranks[index]
        lacking_blocks = blocks_for(prompt_tokens) - rank.cached_blocks
        waits = rank.live_requests >= requests_a_rank or lacking_blocks > rank.free_blocks
        work = rank.queued_tokens + rank.live_requests * TOKENS_A_REQUEST
        if computes_prompt:
            work += prompt_tokens - rank.cached_blocks * BLOCK_TOKENS
        return waits, work, -rank.cached_blocks, index

    return min(range(len(ranks)), key=cost)


def cached_blocks(
    token_ids: Sequence[int], cache_salt: bytes, held: Sequence[Container[bytes]], sparse: SparsePrefill | None = None
) -> list[int]:
    """How many leading blocks of the prompt each rank holds; `held` are each rank's block hashes."""
    counts = [0] * len(held)
    matching = list(range(len(held)))
    for content in iter_chain(token_ids, cache_salt, sparse):
        matching = [rank for rank in matching if content in held[rank]]
        if not matching:
            break
        for rank in matching:
            counts[rank] += 1
    return counts
