"""The two workers' parts of a placement: a share of a decode worker's steps, and a prefill worker's offer of KV.

Pure.
"""

from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from mesh.blocks import BLOCK_TOKENS
from mesh.domain.kv_identity import KvNamespace
from scheduler.placement.candidates import Candidates, CandidateWorker, Pace, PlacementRequest
from scheduler.placement.constants import Constants
from scheduler.placement.terms import Rejection, Verdict
from scheduler.placement.times import (
    Source,
    batch,
    ends_for_blocks,
    growth_tokens,
    place_wait_ms,
    prompt_begins_ms,
    slots_left,
    source,
    step_left_ms,
    step_ms,
)


class DecodeShare(msgspec.Struct, frozen=True, gc=False):
    """When the worker has a place for one request, and how long that request's tokens take there."""

    candidate: CandidateWorker
    # Blocks of the prompt in its pool, and more after these in its host memory.
    held_blocks: int
    host_blocks: int
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
    running = batch(candidate)
    tpot_ms = step_ms(candidate, running + 1, pace, constants)
    output_ms = output_tokens * tpot_ms
    # The requests for whose ends this one waits are as long as the mean, even if this one may not be.
    others_tokens = mean_tokens if mean_tokens < inf else output_tokens
    tokens_each = request.query.prompt_tokens + output_tokens
    # Whether a request has to wait is decided by what is free now: some of the others end while the rest grow.
    room = left = slots_left(tokens_each, 0.0, candidate, requests)
    growth = growth_tokens(candidate, mean_tokens, tpot_ms, now, requests)
    if growth:
        left = slots_left(tokens_each, growth, candidate, requests)
    drain_ms = others_tokens * tpot_ms / (1 if running < 1 else running if running < most else most)
    # On average half of a running step is left, and the worker's report is as old as that.
    boundary_ms = tpot_ms / 2 if requests else 0.0
    # A step that decodes only other ranks' requests takes time too.
    busy = requests or (candidate.others_requests and candidate.joint_prompts is not None)
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
        candidate=candidate,
        held_blocks=held,
        host_blocks=min(candidate.host_blocks, request.reusable_blocks - held),
        before=before,
        wait_ms=wait_ms,
        boundary_ms=boundary_ms,
        tpot_ms=tpot_ms,
        output_ms=output_ms,
        drain_ms=drain_ms,
        slots_left=left if left > 0 else 0,
        requests=requests,
        least_ms=wait_ms + output_ms,
    )


class PrefillOffer(msgspec.Struct, frozen=True, gc=False):
    """The prefill worker's part of a placement."""

    worker: CandidateWorker
    source: Source
    # Predicted milliseconds from the call until the prompt is computed.
    ready_ms: float
    # Predicted milliseconds from the call until the worker begins the prompt.
    queue_ms: float
    push_bytes_per_second: float
    rejection: Rejection | None
    # The rejection in words; empty if there is none.
    rejected: str

    def preference(self, without_drafts: bool = False) -> tuple[bool, bool, float, bool, int, str]:
        """Sort key, best first, like Terms.preference. without_drafts: the offer lacks the receiver's draft layers."""
        return (
            self.rejection is not None,
            not self.worker.connected,
            self.ready_ms,
            without_drafts,
            -self.source.cached_blocks,
            self.worker.identity.worker_id,
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
        namespace = worker.identity.kv_namespace
        store = candidates.stores.get(namespace) if candidates.stores else None
        found = source(request, worker, pace, store, candidates.now, constants)
        queue_ms = request.ahead * worker.prompts_ms(candidates.now, pace, constants.costs)
        if worker.joint_prompts is not None:
            called_at = candidates.now + calls_ms / 1000
            begins_ms = prompt_begins_ms(worker, worker.joint_prompts, found, 0.0, pace, called_at, constants)
            queue_ms = max(queue_ms, begins_ms)
        best = offers.get(namespace)
        usable = best is not None and best.rejection is None and best.worker.connected
        if best is None or not usable or queue_ms + found.ms <= best.ready_ms:
            offer = _offer(request, worker, pace, found, queue_ms, constants)
            if best is None or offer.preference() < best.preference():
                offers[namespace] = offer
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
    rejection, rejected = _reject_offer(request, worker, constants)
    return PrefillOffer(
        worker=worker,
        source=found,
        ready_ms=queue_ms + found.ms,
        queue_ms=queue_ms,
        push_bytes_per_second=pace.push_bytes_per_second,
        rejection=rejection,
        rejected=rejected,
    )


def _reject_offer(request: PlacementRequest, worker: CandidateWorker, constants: Constants) -> Verdict:
    name = worker.identity.worker_id
    context = min(worker.identity.context_tokens, worker.total_blocks * BLOCK_TOKENS)
    if request.query.prompt_tokens >= context:
        return Rejection.CONTEXT, f"{request.query.prompt_tokens} prompt tokens exceed {name}'s context of {context}"
    if worker.unusable is not None:
        return Rejection.UNUSABLE, f"{name}: {worker.unusable}"
    if name in request.query.avoid:
        return Rejection.AVOIDED, f"the gateway asked to avoid {name}"
    if request.ahead * (worker.requests - worker.max_requests) >= constants.config.queue_requests:
        return Rejection.FULL, f"the queue of {name} is full ({constants.config.queue_requests} requests)"
    return None, ""
