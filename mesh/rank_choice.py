"""Chooses the rank of a worker for a request. Pure: a function of plain data.

The scheduler and the worker use the same function: the scheduler with what it knows at placement, the worker with what
it knows when the request arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.block_room import lacking_blocks
from mesh.blocks import BLOCK_TOKENS

# A request that is already on a rank delays a new one about as much as this many prompt tokens would: each of its steps
# computes a token for it and reads its KV.
TOKENS_A_REQUEST = 64


@dataclass(frozen=True, slots=True)
class RankOutlook:
    """The state of one rank that a new request would find."""

    live_requests: int
    # Prompt tokens that the rank has accepted but not computed yet.
    queued_tokens: int
    # Blocks that no live request holds.
    free_blocks: int
    # Leading blocks of the new request's prompt that the rank holds in its KV pool.
    cached_blocks: int
    # Blocks that those live requests take which have none yet.
    pending_blocks: float = 0.0
    # Blocks after the cached ones that it holds in host memory. It reads them into its pool, which takes little time
    # compared with computing them.
    host_blocks: int = 0

    @property
    def found_blocks(self) -> int:
        """Leading blocks of the prompt that it need not compute."""
        return self.cached_blocks + self.host_blocks


def choose_rank(
    ranks: Sequence[RankOutlook],
    prompt_tokens: int,
    computes_prompt: bool,
    requests_a_rank: int,
    booked: int | None = None,
) -> int:
    """Index of the rank that has room and the least predicted work, including the request's own.

    A rank has room if the request would run at once: at most `requests_a_rank` run together, and there are enough free
    blocks for those that wait, for this one, and for all to grow by. If none has room, it is the rank that lacks the
    fewest blocks. Ties go to the rank that holds most of the prefix, then to the first. `computes_prompt` is False if
    the prompt's KV comes from another worker.

    booked: the rank on which the scheduler counts the request. It is chosen unless it lacks room that the best rank
    has, or has more work than the best rank by a request and half of the prompt. In that case, what the scheduler did
    not know matters more than a wrong booking. An index beyond the ranks is ignored: the worker may have restarted with
    fewer.
    """

    def uncached_tokens(rank: RankOutlook) -> int:
        return prompt_tokens - rank.found_blocks * BLOCK_TOKENS if computes_prompt else 0

    def cost(index: int) -> tuple[bool, float, int, int, int]:
        rank = ranks[index]
        lacking = lacking_blocks(
            prompt_tokens, rank.cached_blocks, rank.pending_blocks, rank.live_requests, rank.free_blocks
        )
        waits = rank.live_requests >= requests_a_rank or lacking > 0
        work = rank.queued_tokens + rank.live_requests * TOKENS_A_REQUEST + uncached_tokens(rank)
        return waits, max(lacking, 0), work, -rank.found_blocks, index

    best = min(range(len(ranks)), key=cost)
    if booked is None or booked >= len(ranks):
        return best
    (best_waits, _, least_work, _, _), (waits, _, work, _, _) = cost(best), cost(booked)
    clearly_less = TOKENS_A_REQUEST + uncached_tokens(ranks[best]) // 2
    return best if waits > best_waits or work - least_work > clearly_less else booked
