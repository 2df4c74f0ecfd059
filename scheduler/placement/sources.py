"""How a worker gets the KV of a prompt that it computes: from its own cache, from a store if that is quicker, or by
computing it.
"""

import msgspec

from mesh.blocks import BLOCK_TOKENS
from mesh.domain.sparse_prefill import sparse_part
from mesh.domain.targets import StoreTarget
from mesh.tails import is_tail
from scheduler.placement.candidates import CandidateWorker, Pace, PlacementRequest
from scheduler.placement.constants import Constants


class Source(msgspec.Struct, frozen=True, gc=False):
    """Where the prompt's KV comes from on one worker; times are counted from when the worker begins the prompt."""

    # None if the worker itself has as many blocks, or if computing is faster than fetching.
    store: StoreTarget | None
    # Blocks found on the worker or in the store.
    cached_blocks: int
    uncached_tokens: int
    # Predicted milliseconds of fetch and computation.
    ms: float
    # The computation's part of `ms`, and the part of this that its steps take besides the tokens.
    computing_ms: float = 0.0
    steps_ms: float = 0.0
    # How many of the uncached tokens attend sparsely.
    sparse_tokens: int = 0

    @property
    def is_tail(self) -> bool:
        """Whether the prompt, once fetched, waits for no prompt of another rank."""
        return is_tail(self.uncached_tokens, self.cached_blocks)


def source(
    request: PlacementRequest,
    candidate: CandidateWorker,
    pace: Pace,
    store: StoreTarget | None,
    now: float,
    constants: Constants,
) -> Source:
    """The quickest of three ways: compute all that the candidate lacks, fetch first what the store has of it in memory,
    or fetch also what it has on its disk.

    pace: the candidate's pace. now: see `Candidates`.
    """
    own, reusable = candidate.cached_blocks, request.reusable_blocks
    if own > reusable:
        own = reusable
    best = _computed(request, own, candidate, pace, now, constants)
    if store is None:
        return best
    in_memory = store.blocks - store.disk_blocks
    for target in (StoreTarget(store.store_id, in_memory), store) if store.disk_blocks else (store,):
        blocks = min(target.blocks, request.reusable_blocks)
        if blocks <= own:
            continue
        rest = _computed(request, blocks, candidate, pace, now, constants)
        ms = rest.ms + _fetch_ms(candidate, pace, own, min(blocks, in_memory), blocks, constants)
        if ms < best.ms:
            best = msgspec.structs.replace(rest, store=target, ms=ms)
    return best


def _computed(
    request: PlacementRequest,
    cached_blocks: int,
    candidate: CandidateWorker,
    pace: Pace,
    now: float,
    constants: Constants,
) -> Source:
    cached_tokens, costs = cached_blocks * BLOCK_TOKENS, constants.costs
    uncached_tokens = request.query.prompt_tokens - cached_tokens
    steps_ms = 0.0
    if costs.prefill_step_ms:
        steps = candidate.last_prompt_step.further_steps(uncached_tokens, now, candidate.step_tokens)
        steps_ms = pace.prompt_slowness * steps * costs.prefill_step_ms
    if request.query.sparse is None or not candidate.sparse:
        ms = pace.prompt_slowness * costs.prefill_ms(uncached_tokens, cached_tokens) + steps_ms
        return Source(None, cached_blocks, uncached_tokens, ms, ms, steps_ms)
    sparse = sparse_part(cached_tokens, request.query.prompt_tokens, request.query.sparse.from_tokens)
    exact = uncached_tokens - sparse
    ms = pace.prompt_slowness * costs.prefill_ms(exact, cached_tokens) + steps_ms
    ms += pace.sparse_slowness * costs.sparse_prefill_ms(sparse, cached_tokens + exact)
    return Source(None, cached_blocks, uncached_tokens, ms, ms, steps_ms, sparse)


def _fetch_ms(
    candidate: CandidateWorker, pace: Pace, own: int, in_memory: int, blocks: int, constants: Constants
) -> float:
    """Milliseconds to fetch the blocks after the candidate's own: the first from a store's memory, the rest from its
    disk.
    """
    memory_seconds = max(0, in_memory - own) * candidate.block_bytes / pace.fetch_bytes_per_second
    disk_seconds = (blocks - max(own, in_memory)) * candidate.block_bytes / pace.disk_fetch_bytes_per_second
    return constants.costs.fetch_latency_ms + (memory_seconds + disk_seconds) * 1000
