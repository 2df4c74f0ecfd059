"""How long a request waits on a decode worker: for a place, and for the end of the step that runs. Pure."""

from bisect import bisect_left
from math import ceil, inf

from scheduler.candidates import CandidateWorker, Pace, PlacementKnobs, blocks
from scheduler.joint_prompts import JointPrompts
from scheduler.sources import Source

# Workers report when a step ends, and no sooner than this after a report: when shorter steps end is not known.
SHORTEST_KNOWN_STEP_MS = 50.0


def place_wait_ms(
    candidate: CandidateWorker, before: float, drain_ms: float, stopping: float, boundary_ms: float, now: float
) -> float:
    """Time until `before` requests have ended.

    Without `ends` one ends every `drain_ms`, and reports are `boundary_ms` old. Else a share `stopping` does so,
    and others end when they have as many tokens as they may have.
    """
    if not candidate.ends:
        return before * drain_ms - boundary_ms
    ends, stop_ms = candidate.ends, drain_ms / stopping if stopping else inf

    def ended_ms(count: int) -> float:
        """Until so many have as many tokens as they may have."""
        return (ends[count - 1] - now) * 1000 if count else 0.0

    def stopped_ms(ended: int) -> float:
        """Until as many have stopped as lack if so many have ended so."""
        return (before - ended) * stop_ms - boundary_ms if ended < before else 0.0

    most = min(len(ends), ceil(before))
    if ended_ms(most) < stopped_ms(most):
        # Those behind are as far apart as others.
        return min(stopped_ms(most), ended_ms(most) + (before - most) * drain_ms)
    # The more have ended, the fewer have to stop.
    enough = bisect_left(range(most), True, key=lambda count: ended_ms(count) >= stopped_ms(count))
    return min(ended_ms(enough), stopped_ms(enough - 1)) if enough else 0.0


def step_left_ms(candidate: CandidateWorker, pace: Pace, now: float, knobs: PlacementKnobs) -> float:
    """How much is left of the step that runs when the request comes to the worker."""
    whole_ms = quiet_step_ms(candidate, pace, knobs)
    if candidate.step_began is None or whole_ms < SHORTEST_KNOWN_STEP_MS:
        return whole_ms / 2
    # The report was on its way, and the request is before it is there. It may be the next step then, or one behind.
    on_their_way_ms = knobs.costs.request_ms / 2
    return whole_ms - ((now - candidate.step_began) * 1000 + on_their_way_ms) % whole_ms


def prompt_begins_ms(
    candidate: CandidateWorker,
    joint: JointPrompts,
    found: Source,
    wait_ms: float,
    pace: Pace,
    now: float,
    knobs: PlacementKnobs,
) -> float:
    """How long a prompt waits to begin beside those of other ranks.

    wait_ms: until a step begins in which it has a place.
    """
    comes_at = now + knobs.costs.request_ms / 4000
    longest_ms = 0.0
    token_ms = found.computing_ms / found.uncached_tokens
    divided = joint.divided_tokens is not None and found.uncached_tokens >= joint.divided_tokens
    if found.is_tail or divided:
        if comes_at < joint.begin_at:
            return wait_ms
    elif candidate.requests or candidate.requests_beside:
        longest_ms = joint.wait_steps * quiet_step_ms(candidate, pace, knobs)
    begins_at = joint.begins_at(comes_at, comes_at + wait_ms / 1000, token_ms / 1000, longest_ms / 1000)
    return (begins_at - comes_at) * 1000


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


def quiet_step_ms(candidate: CandidateWorker, pace: Pace, knobs: PlacementKnobs) -> float:
    """Time of its steps without prompts."""
    found_ms = step_ms(candidate, candidate.requests, pace, knobs)
    if candidate.quiet_step_ms is not None and candidate.quiet_step_ms < found_ms:
        found_ms = candidate.quiet_step_ms
    if candidate.joint_prompts is not None:
        # What such a rank measures includes prompts of the others.
        return min(found_ms, knobs.costs.decode_ms(min(candidate.requests, candidate.max_requests)))
    return found_ms
