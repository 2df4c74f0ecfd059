"""Where a request goes: a pure function of the request, the candidates and a few constants.

For each candidate it predicts the time to the first token (what is queued before it, what of the prompt is not cached,
the wait for a place in the batch) and the time per token after that (the step time, grown by one more request), and
counts the requests of mean output length that the candidate still has room for. The cheapest total time wins, among
the workers that are connected if there are any.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from mesh.blocks import BLOCK_TOKENS
from mesh.workers import WorkerLoad


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement needs to know of a request; lengths in tokens."""

    prompt_tokens: int
    max_tokens: int
    avoid: frozenset[str] = frozenset()
    # Of the model's finished requests; None takes what the worker measured.
    mean_output_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Unreported:
    """Work placed on a worker that its load may not show yet."""

    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0

    def __add__(self, other: "Unreported") -> "Unreported":
        return Unreported(
            self.requests + other.requests, self.prefill_tokens + other.prefill_tokens, self.blocks + other.blocks
        )

    def __sub__(self, other: "Unreported") -> "Unreported":
        return Unreported(
            self.requests - other.requests, self.prefill_tokens - other.prefill_tokens, self.blocks - other.blocks
        )


@dataclass(frozen=True, slots=True)
class CandidateWorker:
    """One live worker of the model, and what it holds of this request's prompt."""

    worker_id: str
    # Why it takes no requests at all; None where it does.
    unusable: str | None
    context_tokens: int
    total_blocks: int
    max_requests: int
    load: WorkerLoad
    unreported: Unreported = Unreported()
    # Blocks of the prompt that it has, from the root on.
    cached_blocks: int = 0
    # Whether its status stream is up. One whose stream broke may be well, and may be dead.
    connected: bool = True


@dataclass(frozen=True, slots=True)
class PlacementKnobs:
    """Constants of the prediction, and what stands in for a measurement while there is none."""

    prefill_tokens_per_second: float = 5000.0
    decode_step_ms: float = 20.0
    mean_output_tokens: float = 256.0
    # How much one more request lengthens a step, relative to a step of one request.
    step_growth: float = 0.02
    # Requests that may wait on a worker for a place in its batch.
    queue_requests: int = 512


class Rejection(Enum):
    """Why a candidate was not taken."""

    UNUSABLE = "unusable"
    AVOIDED = "avoided"
    CONTEXT = "context"
    FULL = "full"
    OBJECTIVE = "objective"


@dataclass(frozen=True, slots=True)
class Terms:
    """What placement found for one candidate."""

    worker_id: str
    cached_blocks: int
    uncached_tokens: int
    ttft_ms: float
    tpot_ms: float
    # Requests like this one, at mean output length, that it still has room for.
    slots_left: int
    # Predicted time until one of its requests ends.
    drain_ms: float
    # Predicted time to the last token: what is minimised.
    total_ms: float
    # Requests it has, and was given.
    requests: int
    connected: bool
    rejection: Rejection | None = None
    # The rejection in words; empty where there is none.
    rejected: str = ""


def predict(
    request: PlacementRequest, candidates: Iterable[CandidateWorker], knobs: PlacementKnobs
) -> tuple[Terms, ...]:
    """The terms of every candidate, in their order; those that cannot take the request carry a rejection."""
    return tuple(_predict(request, candidate, knobs) for candidate in candidates)


def choose(terms: Collection[Terms]) -> Terms | None:
    """The best of those that were not rejected; None where all were."""
    return min((term for term in terms if term.rejection is None), key=preference, default=None)


def preference(term: Terms) -> tuple[bool, bool, float, int, int, str]:
    """Sorts the best first: the cheapest of those connected, of equal ones the one with more cached, then the emptier,
    then the first by name."""
    unlikely = not term.connected
    return term.rejection is not None, unlikely, term.total_ms, -term.cached_blocks, term.requests, term.worker_id


def placed_work(request: PlacementRequest, chosen: Terms) -> Unreported:
    """What the chosen worker will have to carry until it reports it itself."""
    blocks = _blocks(request.prompt_tokens + 1) - chosen.cached_blocks
    return Unreported(requests=1, prefill_tokens=chosen.uncached_tokens, blocks=blocks)


def explain(chosen: Terms, terms: Collection[Terms]) -> str:
    """The decision in words."""
    return (
        f"{chosen.worker_id}: first token in {chosen.ttft_ms:.1f} ms ({chosen.uncached_tokens} prompt tokens to "
        f"compute, {chosen.cached_blocks} blocks cached, {chosen.requests} requests before it), then "
        f"{chosen.tpot_ms:.2f} ms a token; {chosen.slots_left} slots left; best of {len(terms)}"
    )


def _predict(request: PlacementRequest, candidate: CandidateWorker, knobs: PlacementKnobs) -> Terms:
    load, unreported = candidate.load, candidate.unreported
    mean_output_tokens = request.mean_output_tokens or load.mean_output_tokens or knobs.mean_output_tokens
    output_tokens = min(float(request.max_tokens), mean_output_tokens)
    # The last token is always computed: its logits give the first new one.
    cached_blocks = min(candidate.cached_blocks, max(0, request.prompt_tokens - 1) // BLOCK_TOKENS)
    uncached_tokens = request.prompt_tokens - cached_blocks * BLOCK_TOKENS

    requests = load.running_requests + load.waiting_requests + unreported.requests
    room = _room(request.prompt_tokens + output_tokens, candidate, requests)
    running = min(max(requests, 1), candidate.max_requests)
    tpot_ms = _step_ms(candidate, requests + 1, knobs)
    output_ms = output_tokens * tpot_ms
    drain_ms = output_ms / running

    ahead = max(0, 1 - room)
    rate = load.prefill_tokens_per_second or knobs.prefill_tokens_per_second
    prefill_tokens = load.queued_prefill_tokens + unreported.prefill_tokens + uncached_tokens
    ttft_ms = ahead * drain_ms + prefill_tokens / rate * 1000 + tpot_ms
    rejection, rejected = _reject(request, candidate, ahead, knobs)
    return Terms(
        worker_id=candidate.worker_id,
        cached_blocks=cached_blocks,
        uncached_tokens=uncached_tokens,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        slots_left=max(0, room),
        drain_ms=drain_ms,
        total_ms=ttft_ms + output_ms,
        requests=requests,
        connected=candidate.connected,
        rejection=rejection,
        rejected=rejected,
    )


def _room(tokens_each: float, candidate: CandidateWorker, requests: int) -> int:
    """Requests of that length which fit beside those there are; what is below 0 waits for as many to end."""
    load, unreported = candidate.load, candidate.unreported
    by_batch = candidate.max_requests - requests
    # Waiting requests hold no blocks yet and are taken to be like this one.
    by_blocks = (load.free_blocks - unreported.blocks) // _blocks(tokens_each) - load.waiting_requests
    return min(by_batch, by_blocks)


def _step_ms(candidate: CandidateWorker, requests: int, knobs: PlacementKnobs) -> float:
    """A step's length with `requests` in the batch, from the one measured with those that run now."""
    measured = candidate.load.decode_step_ms or knobs.decode_step_ms
    batch = min(requests, candidate.max_requests)
    measured_batch = max(1, candidate.load.running_requests)
    return measured * (1 + knobs.step_growth * batch) / (1 + knobs.step_growth * measured_batch)


def _reject(
    request: PlacementRequest, candidate: CandidateWorker, ahead: int, knobs: PlacementKnobs
) -> tuple[Rejection | None, str]:
    tokens = request.prompt_tokens + request.max_tokens
    context = min(candidate.context_tokens, candidate.total_blocks * BLOCK_TOKENS)
    if tokens > context:
        return Rejection.CONTEXT, f"{tokens} tokens exceed its context of {context}"
    if candidate.unusable is not None:
        return Rejection.UNUSABLE, candidate.unusable
    if candidate.worker_id in request.avoid:
        return Rejection.AVOIDED, "the gateway asked to avoid it"
    if ahead > knobs.queue_requests:
        return Rejection.FULL, f"no slot, and its queue is full ({knobs.queue_requests} requests)"
    return None, ""


def _blocks(tokens: float) -> int:
    return max(1, -int(-tokens // BLOCK_TOKENS))
