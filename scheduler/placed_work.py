"""What a placement brings the ranks that it names. Pure."""

import msgspec

from mesh.tails import is_tail
from scheduler.candidates import PlacementKnobs, PlacementRequest, Unreported, blocks
from scheduler.terms import Terms


class PlacedWork(msgspec.Struct, frozen=True, gc=False):
    """What a placement brings one of its ranks. Times are predictions, by the clock of `Candidates.now`."""

    load: Unreported
    # How long the rank computes for the prompt, and when the prompt comes; 0 is at once.
    prompt_seconds: float = 0.0
    comes_at: float = 0.0
    # When the prompt begins on a rank whose prompts begin with those of others; None if it waits for none of them.
    begins_at: float | None = 0.0
    # If the rank decodes: when the request ends if it has as many tokens as it may have.
    ends_at: float | None = None


def placed_work(
    request: PlacementRequest, chosen: Terms, now: float, knobs: PlacementKnobs
) -> dict[tuple[str, int], PlacedWork]:
    """What the request brings each chosen worker's rank."""
    taken, decode = blocks(request.prompt_tokens + 1), (chosen.worker_id, chosen.rank or 0)
    lacking, prompt_seconds = taken - chosen.held_blocks, chosen.prompt_ms / 1000
    ends_ms = chosen.ttft_ms - knobs.costs.request_ms + (request.max_tokens - 1) * chosen.tpot_ms
    if chosen.prefill_worker_id is None:
        load = Unreported(1, chosen.uncached_tokens, lacking)
        alone = is_tail(chosen.uncached_tokens, chosen.cached_blocks)
        begins_at = None if alone else now + chosen.wait_ms / 1000
        return {decode: PlacedWork(load, prompt_seconds, begins_at=begins_at, ends_at=now + ends_ms / 1000)}
    # The second token of a pair waits for the end of a step.
    ends_ms += chosen.tpot_ms / 2
    load = Unreported(1, chosen.uncached_tokens, taken)
    begins_ms = chosen.ttft_ms - chosen.prompt_ms - knobs.costs.request_ms - knobs.costs.handover_ms / 2
    return {
        decode: PlacedWork(Unreported(1, 0, lacking), ends_at=now + ends_ms / 1000),
        (chosen.prefill_worker_id, chosen.prefill_rank or 0): PlacedWork(
            load, prompt_seconds, now + chosen.wait_ms / 1000, now + begins_ms / 1000
        ),
    }
