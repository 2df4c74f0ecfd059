"""How a worker that computes a prompt gets its KV: from its own cache, from a store if that is quicker, or computed."""

import msgspec

from mesh.blocks import BLOCK_TOKENS
from mesh.domain.targets import StoreTarget
from scheduler.candidates import CandidateWorker, PlacementKnobs, PlacementRequest


class Source(msgspec.Struct, frozen=True, gc=False):
    """Where the prompt's KV comes from on one worker, counted from when the worker starts on the prompt."""

    # None if the worker has as many blocks, or computing is faster than fetching.
    store: StoreTarget | None
    # Blocks found on the worker or in the store.
    cached_blocks: int
    uncached_tokens: int
    # Predicted time of fetch and computation.
    ms: float


def source(
    request: PlacementRequest, candidate: CandidateWorker, store: StoreTarget | None, knobs: PlacementKnobs
) -> Source:
    """The quicker of two ways: to compute all that the candidate lacks, or to fetch first what the store has of it.

    The candidate is informed (see `estimates`).
    """
    rate = candidate.pace.prefill_tokens_per_second
    own = reusable_blocks(request, candidate.cached_blocks)
    computed = _computed(request, own, rate)
    if store is None or (more := reusable_blocks(request, store.blocks) - own) <= 0:
        return computed
    transfer_ms = more * candidate.block_bytes / candidate.pace.fetch_bytes_per_second * 1000
    fetch_ms = knobs.costs.fetch_latency_ms + transfer_ms
    rest = _computed(request, own + more, rate)
    if fetch_ms + rest.ms >= computed.ms:
        return computed
    return Source(store, rest.cached_blocks, rest.uncached_tokens, fetch_ms + rest.ms)


def reusable_blocks(request: PlacementRequest, blocks: int) -> int:
    """How many of `blocks` can be used: the last token is always computed, since its logits give the first new one."""
    return min(blocks, max(0, request.prompt_tokens - 1) // BLOCK_TOKENS)


def _computed(request: PlacementRequest, cached_blocks: int, rate: float) -> Source:
    uncached_tokens = request.prompt_tokens - cached_blocks * BLOCK_TOKENS
    return Source(None, cached_blocks, uncached_tokens, uncached_tokens / rate * 1000)
