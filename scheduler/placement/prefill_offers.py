"""The quickest prefill worker of each KV namespace for a request. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from mesh.blocks import BLOCK_TOKENS
from mesh.domain.workers import KvNamespace
from scheduler.placement.candidates import Candidates, CandidateWorker, Pace, PlacementRequest
from scheduler.placement.constants import Constants
from scheduler.placement.sources import Source, source
from scheduler.placement.terms import Rejection
from scheduler.placement.waits import prompt_begins_ms


class PrefillOffer(msgspec.Struct, frozen=True, gc=False):
    """The prefill worker's part of a placement."""

    worker_id: str
    source: Source
    # Predicted milliseconds from the call until the prompt is computed.
    ready_ms: float
    # Predicted milliseconds from the call until the worker begins the prompt.
    queue_ms: float
    push_bytes_per_second: float
    # As of the worker; see CandidateWorker.
    layerwise_tokens: int
    connected: bool
    rejection: Rejection | None
    # The rejection in words; empty if there is none.
    rejected: str
    # The rank of the worker; None if it has only one.
    rank: int | None

    def preference(self, without_drafts: bool = False) -> tuple[bool, bool, float, bool, int, str]:
        """Sort key, best first, like Terms.preference. without_drafts: the offer lacks the receiver's draft layers."""
        return (
            self.rejection is not None,
            not self.connected,
            self.ready_ms,
            without_drafts,
            -self.source.cached_blocks,
            self.worker_id,
        )


def best_offers(
    request: PlacementRequest, candidates: Candidates, paces: Sequence[Pace], constants: Constants
) -> dict[KvNamespace, PrefillOffer]:
    """The best offer of each namespace. It is the best for nearly every decode worker, since the times of both add up.

    The exception: a prefill worker's queue passes while a decode worker makes the request wait. Another offer may then
    be better for that worker, by no more than its wait.

    paces: of the prefill workers.
    """
    offers: dict[KvNamespace, PrefillOffer] = {}
    calls_ms = constants.costs.handover_ms / 2
    for worker, pace in zip(candidates.prefill, paces, strict=True):
        store = candidates.stores.get(worker.namespace) if candidates.stores else None
        found = source(request, worker, pace, store, candidates.now, constants)
        queue_ms = request.ahead * worker.prompts_ms(candidates.now, pace, constants.costs)
        if worker.joint_prompts is not None:
            called_at = candidates.now + calls_ms / 1000
            begins_ms = prompt_begins_ms(worker, worker.joint_prompts, found, 0.0, pace, called_at, constants)
            queue_ms = max(queue_ms, begins_ms)
        best = offers.get(worker.namespace)
        if best is None or queue_ms + found.ms <= best.ready_ms or best.rejection is not None or not best.connected:
            offer = _offer(request, worker, pace, found, queue_ms, constants)
            if best is None or offer.preference() < best.preference():
                offers[worker.namespace] = offer
    return offers


def offer_to(namespace: KvNamespace, offers: Mapping[KvNamespace, PrefillOffer]) -> PrefillOffer | None:
    """The best offer of KV that a decode worker of this namespace can take; None if there is none."""
    fitting = [(offered, offer) for offered, offer in offers.items() if offered.shares_base(namespace)]
    if len(fitting) < 2:
        return fitting[0][1] if fitting else None
    return min(fitting, key=lambda each: each[1].preference(without_drafts=not each[0].provides(namespace)))[1]


def _offer(
    request: PlacementRequest,
    worker: CandidateWorker,
    pace: Pace,
    found: Source,
    queue_ms: float,
    constants: Constants,
) -> PrefillOffer:
    rejection, rejected = _reject(request, worker, constants)
    return PrefillOffer(
        worker.worker_id,
        found,
        queue_ms + found.ms,
        queue_ms,
        pace.push_bytes_per_second,
        worker.layerwise_tokens,
        worker.connected,
        rejection,
        rejected,
        worker.rank,
    )


def _reject(request: PlacementRequest, worker: CandidateWorker, constants: Constants) -> tuple[Rejection | None, str]:
    name, context = worker.worker_id, min(worker.context_tokens, worker.total_blocks * BLOCK_TOKENS)
    if request.query.prompt_tokens >= context:
        return Rejection.CONTEXT, f"{request.query.prompt_tokens} prompt tokens exceed {name}'s context of {context}"
    if worker.unusable is not None:
        return Rejection.UNUSABLE, f"{name}: {worker.unusable}"
    if name in request.query.avoid:
        return Rejection.AVOIDED, f"the gateway asked to avoid {name}"
    if request.ahead * (worker.requests - worker.max_requests) >= constants.config.queue_requests:
        return Rejection.FULL, f"the queue of {name} is full ({constants.config.queue_requests} requests)"
    return None, ""
