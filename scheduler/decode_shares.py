"""What a decode worker brings to a placement, whichever worker computes the prompt: a place in its steps. Pure."""

import msgspec

from scheduler.candidates import CandidateWorker, Pace, PlacementKnobs, PlacementRequest, blocks

# Workers report when a step ends, and no sooner than this after a report: when shorter steps end is not known.
SHORTEST_KNOWN_STEP_MS = 50.0


class DecodeShare(msgspec.Struct, frozen=True, gc=False):
    """When the worker has a place for one request, and how long the tokens of that take there."""

    candidate: CandidateWorker
    held_blocks: int
    # How many must end before it has a place.
    before: float
    # Time until the step begins in which the request has a place.
    wait_ms: float
    # Time until any step begins, for what comes at a moment that is not known.
    boundary_ms: float
    tpot_ms: float
    output_ms: float
    drain_ms: float
    slots_left: int
    requests: int
    # Its wait and its tokens: no placement on it takes less.
    least_ms: float


def decode_share(
    request: PlacementRequest, candidate: CandidateWorker, pace: Pace, now: float, knobs: PlacementKnobs
) -> DecodeShare:
    requests, most = candidate.requests, candidate.max_requests
    output_tokens = request.mean_output_tokens or candidate.load.mean_output_tokens or knobs.mean_output_tokens
    if output_tokens > request.max_tokens:
        output_tokens = float(request.max_tokens)
    room = slots_left(request.prompt_tokens + output_tokens, candidate, requests)
    tpot_ms = step_ms(candidate, requests + 1, pace, knobs)
    output_ms = output_tokens * tpot_ms
    drain_ms = output_ms / (1 if requests < 1 else requests if requests < most else most)
    # A step that runs is over in half of its time on average, and its worker's report is as old.
    boundary_ms = tpot_ms / 2 if requests else 0.0
    wait_ms, before = _step_left_ms(candidate, pace, now, knobs) if requests else 0.0, 0.0
    if room < 1:
        before = request.ahead * (1 - room)
        wait_ms = max(wait_ms, _place_wait_ms(request, candidate, before, drain_ms, boundary_ms, now))
    held, reusable = candidate.cached_blocks, request.reusable_blocks
    return DecodeShare(
        candidate,
        held if held < reusable else reusable,
        before,
        wait_ms,
        boundary_ms,
        tpot_ms,
        output_ms,
        drain_ms,
        room if room > 0 else 0,
        requests,
        wait_ms + output_ms,
    )


def _place_wait_ms(
    request: PlacementRequest,
    candidate: CandidateWorker,
    before: float,
    drain_ms: float,
    boundary_ms: float,
    now: float,
) -> float:
    """Time until so many requests have ended: some have as many tokens as they may have, others stop by themselves."""
    if not candidate.ends:
        return before * drain_ms - boundary_ms
    stop_ms, least_ms = drain_ms / request.stopping if request.stopping else float("inf"), float("inf")
    for certain, end in enumerate((now, *candidate.ends)):
        certain_ms, stops = (end - now) * 1000, before - certain
        if stops <= 0:
            return min(least_ms, certain_ms)
        least_ms = min(least_ms, max(certain_ms, stops * stop_ms - boundary_ms))
    return least_ms


def _step_left_ms(candidate: CandidateWorker, pace: Pace, now: float, knobs: PlacementKnobs) -> float:
    """How much is left of the step that runs when the request comes to the worker."""
    whole_ms = step_ms(candidate, candidate.requests, pace, knobs)
    if candidate.quiet_step_ms is not None and candidate.quiet_step_ms < whole_ms:
        whole_ms = candidate.quiet_step_ms
    if candidate.step_began is None or whole_ms < SHORTEST_KNOWN_STEP_MS:
        return whole_ms / 2
    # It may be the next step, or one behind, of which no report has come yet.
    return whole_ms - (now - candidate.step_began) * 1000 % whole_ms


def slots_left(tokens_each: float, candidate: CandidateWorker, requests: int) -> int:
    """How many more requests of that length fit. If negative, so many must end before there is room."""
    load, unreported = candidate.load, candidate.unreported
    by_batch = candidate.max_requests - requests
    # Waiting requests hold no blocks yet; they are assumed to be as long as this one.
    by_blocks = (load.free_blocks - unreported.blocks) // blocks(tokens_each) - load.waiting_requests
    return min(by_batch, by_blocks)


def step_ms(candidate: CandidateWorker, requests: int, pace: Pace, knobs: PlacementKnobs) -> float:
    """Step time at the candidate's pace with `requests` in the batch."""
    most = candidate.max_requests
    return pace.slowness * knobs.costs.decode_ms(requests if requests < most else most)
