"""How long a request waits on a decode worker: for a place, and for the end of the step that runs. Pure."""

from scheduler.candidates import CandidateWorker, Pace, PlacementKnobs, blocks

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
    stop_ms, least_ms = drain_ms / stopping if stopping else float("inf"), float("inf")
    for certain, end in enumerate((now, *candidate.ends)):
        certain_ms, stops = (end - now) * 1000, before - certain
        if stops <= 0:
            return min(least_ms, certain_ms)
        least_ms = min(least_ms, max(certain_ms, stops * stop_ms - boundary_ms))
    return least_ms


def step_left_ms(candidate: CandidateWorker, pace: Pace, now: float, knobs: PlacementKnobs) -> float:
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
