"""Which rank of a worker a request goes to. Pure: a function of plain data.

A scheduler and the worker choose alike, the one by what it knows when it places the request, the other by what it knows
when the request comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.blocks import BLOCK_TOKENS, blocks_for

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


def choose_rank(
    ranks: Sequence[RankOutlook],
    prompt_tokens: int,
    computes_prompt: bool,
    requests_a_rank: int,
    booked: int | None = None,
) -> int:
    """Index of the rank with room and the least predicted work, the request's own included.

    A rank has room where the request would run at once: at most `requests_a_rank` run together, in free blocks. Of
    equals the one with most of the prefix is chosen, then the first. `computes_prompt` is False for a prompt whose KV
    comes from another worker.

    booked: the rank on which a scheduler counts the request. It is chosen unless it lacks room that the best one has,
    or has more work than that by a request and half of the prompt: what the scheduler did not know then counts more
    than what it would book wrongly. A worker may have begun anew with fewer ranks: an index beyond them counts for
    nothing.
    """

    def uncached_tokens(rank: RankOutlook) -> int:
        return prompt_tokens - rank.cached_blocks * BLOCK_TOKENS if computes_prompt else 0

    def cost(index: int) -> tuple[bool, int, int, int]:
        rank = ranks[index]
        lacking_blocks = blocks_for(prompt_tokens) - rank.cached_blocks
        waits = rank.live_requests >= requests_a_rank or lacking_blocks > rank.free_blocks
        work = rank.queued_tokens + rank.live_requests * TOKENS_A_REQUEST + uncached_tokens(rank)
        return waits, work, -rank.cached_blocks, index

    best = min(range(len(ranks)), key=cost)
    if booked is None or booked >= len(ranks):
        return best
    (best_waits, least_work, _, _), (waits, work, _, _) = cost(best), cost(booked)
    clearly_less = TOKENS_A_REQUEST + uncached_tokens(ranks[best]) // 2
    return best if waits > best_waits or work - least_work > clearly_less else booked
