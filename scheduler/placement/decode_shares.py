"""The decode worker's part of a placement, whichever worker computes the prompt: a place in its steps. Pure."""

from math import inf

import msgspec

from scheduler.placement.block_room import batch, ends_for_blocks
from scheduler.placement.candidates import CandidateWorker, Pace, PlacementRequest
from scheduler.placement.constants import Constants
from scheduler.placement.waits import place_wait_ms, slots_left, step_left_ms, step_ms


class DecodeShare(msgspec.Struct, frozen=True, gc=False):
    """When the worker has a place for one request, and how long that request's tokens take there."""

    candidate: CandidateWorker
    held_blocks: int
    # How many requests must end before the worker has a place.
    before: float
    # Milliseconds until the step begins in which the request has a place.
    wait_ms: float
    # Milliseconds until any step begins, for an event whose time is not known.
    boundary_ms: float
    tpot_ms: float
    output_ms: float
    drain_ms: float
    slots_left: int
    requests: int
    # Its wait and its tokens: no placement on this worker takes less.
    least_ms: float


def decode_share(
    request: PlacementRequest, candidate: CandidateWorker, pace: Pace, now: float, constants: Constants
) -> DecodeShare:
    requests, most = candidate.requests, candidate.max_requests
    mean_tokens = request.mean_output_tokens or candidate.load.mean_output_tokens or constants.config.mean_output_tokens
    output_tokens = float(request.query.max_tokens) if mean_tokens > request.query.max_tokens else mean_tokens
    room = slots_left(request.query.prompt_tokens + output_tokens, candidate, requests)
    running = batch(candidate)
    tpot_ms = step_ms(candidate, running + 1, pace, constants)
    output_ms = output_tokens * tpot_ms
    # The requests for whose ends this one waits are as long as the mean, even if this one may not be.
    others_tokens = mean_tokens if mean_tokens < inf else output_tokens
    drain_ms = others_tokens * tpot_ms / (1 if running < 1 else running if running < most else most)
    # On average half of a running step is left, and the worker's report is as old as that.
    boundary_ms = tpot_ms / 2 if requests else 0.0
    # A step that decodes only other ranks' requests takes time too.
    busy = requests or (candidate.requests_beside and candidate.joint_prompts is not None)
    wait_ms, before = step_left_ms(candidate, pace, now, constants) if busy else 0.0, 0.0
    if room < 1:
        before = request.ahead * (1 - room)
    held = candidate.cached_blocks
    if held > request.reusable_blocks:
        held = request.reusable_blocks
    if requests >= most:
        places = request.ahead * (requests - most + 1)
        wait_ms = max(wait_ms, place_wait_ms(candidate, places, drain_ms, request.stopping, boundary_ms, now))
    ends = ends_for_blocks(candidate, request.query.prompt_tokens, held, others_tokens)
    if ends:
        # `candidate.ends` does not help here: it includes requests that wait for blocks themselves. Of the running
        # ones, one ends every `drain_ms`.
        wait_ms = max(wait_ms, request.ahead * ends * drain_ms - boundary_ms)
    return DecodeShare(
        candidate,
        held,
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
