"""How long a request waits on a decode worker: for a place, and for the end of the running step. Pure."""

from bisect import bisect_left
from math import ceil, inf

from scheduler.placement.block_room import batch
from scheduler.placement.candidates import CandidateWorker, Pace, blocks
from scheduler.placement.constants import Constants
from scheduler.placement.joint_prompts import JointPrompts
from scheduler.placement.sources import Source

# Workers report at the end of a step, but at most once within this time, so ends of shorter steps are not known.
SHORTEST_KNOWN_STEP_MS = 50.0


def place_wait_ms(
    candidate: CandidateWorker, before: float, drain_ms: float, stopping: float, boundary_ms: float, now: float
) -> float:
    """Milliseconds until `before` requests have ended.

    Without `ends`, one request ends every `drain_ms`, and reports are `boundary_ms` old. With `ends`, a share
    `stopping` of the requests ends in this way, and the others end when they reach their token limit.
    """
    if not candidate.ends:
        return before * drain_ms - boundary_ms
    ends, stop_ms = candidate.ends, drain_ms / stopping if stopping else inf

    def ended_ms(count: int) -> float:
        """Milliseconds until `count` requests have reached their token limit."""
        return (ends[count - 1] - now) * 1000 if count else 0.0

    def stopped_ms(ended: int) -> float:
        """Milliseconds until enough others have stopped, if `ended` requests have reached their limit."""
        return (before - ended) * stop_ms - boundary_ms if ended < before else 0.0

    most = min(len(ends), ceil(before))
    if ended_ms(most) < stopped_ms(most):
        # The ends beyond the known ones are assumed to come every `drain_ms`.
        return min(stopped_ms(most), ended_ms(most) + (before - most) * drain_ms)
    # The more requests reach their limit, the fewer have to stop.
    enough = bisect_left(range(most), True, key=lambda count: ended_ms(count) >= stopped_ms(count))
    return min(ended_ms(enough), stopped_ms(enough - 1)) if enough else 0.0


def step_left_ms(candidate: CandidateWorker, pace: Pace, now: float, constants: Constants) -> float:
    """Milliseconds that are left of the running step when the request reaches the worker."""
    whole_ms = quiet_step_ms(candidate, pace, constants)
    if candidate.step_began is None or whole_ms < SHORTEST_KNOWN_STEP_MS:
        return whole_ms / 2
    # Both the report and the request travel for a while. By then the step may have ended and a later one be running,
    # hence the modulo.
    on_their_way_ms = constants.costs.request_ms / 2
    return whole_ms - ((now - candidate.step_began) * 1000 + on_their_way_ms) % whole_ms


def prompt_begins_ms(
    candidate: CandidateWorker,
    joint: JointPrompts,
    found: Source,
    wait_ms: float,
    pace: Pace,
    now: float,
    constants: Constants,
) -> float:
    """How long a prompt waits to begin together with those of other ranks.

    wait_ms: milliseconds until a step begins in which it has a place.
    """
    comes_at = now + constants.costs.request_ms / 4000
    longest_ms = 0.0
    token_ms = (found.computing_ms - found.steps_ms) / found.uncached_tokens
    full_step_ms = joint.step_tokens * token_ms + pace.prompt_slowness * constants.costs.prefill_step_ms
    divided = joint.divided_tokens is not None and found.uncached_tokens >= joint.divided_tokens
    if found.is_tail or divided:
        if comes_at < joint.begin_at:
            return wait_ms
    elif candidate.requests or candidate.requests_beside:
        longest_ms = joint.wait_steps * quiet_step_ms(candidate, pace, constants)
    begins_at = joint.begins_at(comes_at, comes_at + wait_ms / 1000, full_step_ms / 1000, longest_ms / 1000)
    return (begins_at - comes_at) * 1000


def slots_left(tokens_each: float, candidate: CandidateWorker, requests: int) -> int:
    """How many more requests of that length fit. If negative, as many must end before there is room."""
    load, unreported = candidate.load, candidate.unreported
    by_batch = candidate.max_requests - requests
    # Waiting requests hold no blocks yet; they are assumed to be as long as this one.
    by_blocks = (load.free_blocks - unreported.blocks) // blocks(tokens_each) - load.waiting_requests
    return min(by_batch, by_blocks)


def step_ms(candidate: CandidateWorker, requests: float, pace: Pace, constants: Constants) -> float:
    """Step time at the candidate's pace with `requests` in the batch."""
    most = candidate.max_requests
    return pace.slowness * constants.costs.decode_ms(requests if requests < most else most)


def quiet_step_ms(candidate: CandidateWorker, pace: Pace, constants: Constants) -> float:
    """Duration of the candidate's steps without prompts."""
    requests = batch(candidate)
    found_ms = step_ms(candidate, requests, pace, constants)
    if candidate.quiet_step_ms is not None and candidate.quiet_step_ms < found_ms:
        found_ms = candidate.quiet_step_ms
    if candidate.joint_prompts is not None:
        # What such a rank measures includes other ranks' prompts.
        return min(found_ms, constants.costs.decode_ms(min(requests, candidate.max_requests)))
    return found_ms
