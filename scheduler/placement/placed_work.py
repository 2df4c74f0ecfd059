"""The work that a placement brings to the ranks that it names. Pure."""

import msgspec

from mesh.tails import is_tail
from scheduler.placement.candidates import PlacementRequest, Unreported, blocks
from scheduler.placement.constants import Constants
from scheduler.placement.terms import Terms


class PlacedWork(msgspec.Struct, frozen=True, gc=False):
    """The work that a placement brings to one rank. Times are predictions on the clock of `Candidates.now`."""

    load: Unreported
    # How long the rank computes the prompt, and when the prompt arrives; 0 means at once.
    prompt_seconds: float = 0.0
    comes_at: float = 0.0
    # When the prompt begins on a rank whose prompts begin together with other ranks'; None if it waits for none of
    # them.
    begins_at: float | None = 0.0
    # If the rank decodes: when the request ends if it reaches its token limit.
    ends_at: float | None = None


def placed_work(
    request: PlacementRequest, chosen: Terms, now: float, constants: Constants
) -> dict[tuple[str, int], PlacedWork]:
    """The work that the request brings to the rank of each chosen worker."""
    taken, decode = blocks(request.query.prompt_tokens + 1), (chosen.worker_id, chosen.rank or 0)
    lacking, prompt_seconds = taken - chosen.held_blocks, chosen.prompt_ms / 1000
    ends_ms = chosen.ttft_ms - constants.costs.request_ms + (request.query.max_tokens - 1) * chosen.tpot_ms
    if chosen.prefill_worker_id is None:
        load = Unreported(1, chosen.uncached_tokens, lacking)
        alone = is_tail(chosen.uncached_tokens, chosen.cached_blocks)
        begins_at = None if alone else now + chosen.wait_ms / 1000
        return {decode: PlacedWork(load, prompt_seconds, begins_at=begins_at, ends_at=now + ends_ms / 1000)}
    # With a prefill worker, the second token waits on average half a step for the current step to end.
    ends_ms += chosen.tpot_ms / 2
    load = Unreported(1, chosen.uncached_tokens, taken)
    begins_ms = chosen.ttft_ms - chosen.prompt_ms - constants.costs.request_ms - constants.costs.handover_ms / 2
    return {
        decode: PlacedWork(Unreported(1, 0, lacking), ends_at=now + ends_ms / 1000),
        (chosen.prefill_worker_id, chosen.prefill_rank or 0): PlacedWork(
            load, prompt_seconds, now + chosen.wait_ms / 1000, now + begins_ms / 1000
        ),
    }
