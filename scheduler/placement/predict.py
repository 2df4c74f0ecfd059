"""What each placement of a request would mean: a pure function of the request, the candidates and a few constants.

A candidate is a decode worker that computes the prompt itself, or a decode worker with the best prefill worker of the
same KV namespace. If a worker has several DP ranks, the candidate is the rank that the worker itself would choose
(`mesh/rank_choice.py`).

For each candidate, placement predicts the time to the first token: the wait for a place in the batch or for the end of
the running step, the prompts queued before this one, and the part of the prompt that is cached neither on the worker
nor, if fetching is quicker than computing, in a store. Then it predicts the time per token (the step time with one more
request). For a pair it adds the time between the first token and the second: the handover, the push of blocks that the
decode worker lacks, and the wait for the step that begins with them. A prompt computed on a decode worker delays the
requests that decode there; this counts against the candidate if a prefill worker could compute the prompt instead. A
prompt with few uncached tokens delays no request. `choose` takes the candidate with
the least total time; connected workers go before others.

The work is linear in the number of workers, because only the best prefill worker can be part of the best pair.
"""

from collections.abc import Iterator
from typing import TypeAlias

from mesh.blocks import BLOCK_TOKENS
from scheduler.placement.candidates import Candidates, CandidateWorker, Pace, PlacementRequest
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import paces
from scheduler.placement.parts import DecodeShare, PrefillOffer, best_offers, decode_share, offer_to
from scheduler.placement.terms import Rejection, Terms, Verdict
from scheduler.placement.times import Source, host_read_ms, prompt_begins_ms, source

# A decode worker's share, its pace, and the best prefill offer that it could take.
Parts: TypeAlias = tuple[DecodeShare, Pace, PrefillOffer | None]


def predict(request: PlacementRequest, candidates: Candidates, constants: Constants) -> tuple[Terms, ...]:
    """The terms of every candidate; those that cannot take the request carry a rejection."""
    terms: list[Terms] = []
    for parts in parts_of(request, candidates, constants):
        terms += terms_of(request, parts, candidates, constants)
    return tuple(terms)


def parts_of(request: PlacementRequest, candidates: Candidates, constants: Constants) -> Iterator[Parts]:
    """The parts of each decode worker's placements."""
    decode_paces, prefill_paces = paces(candidates, constants)
    offers = best_offers(request, candidates, prefill_paces, constants)
    fitting = {name: offer_to(name, offers) for name in {each.identity.kv_namespace for each in candidates.decode}}
    for worker, pace in zip(candidates.decode, decode_paces, strict=True):
        share = decode_share(request, worker, pace, candidates.now, constants)
        yield share, pace, fitting[worker.identity.kv_namespace]


def count_of(parts: Parts) -> int:
    """How many terms `terms_of` gives."""
    share, _, offer = parts
    worker = share.candidate.identity
    return worker.can_prefill + (not worker.can_prefill or (offer is not None and worker.receives_kv))


def terms_of(request: PlacementRequest, parts: Parts, candidates: Candidates, constants: Constants) -> list[Terms]:
    """The terms of one decode worker: alone, and with the prefill worker of its offer."""
    share, pace, offer = parts
    worker = share.candidate
    verdict = _reject(request, worker, share.before, constants)
    terms = []
    if worker.identity.can_prefill:
        terms.append(_alone(request, share, verdict, pace, candidates, constants))
    if offer is not None and worker.identity.receives_kv:
        terms.append(_pair(request, share, verdict, offer, constants))
    elif not worker.identity.can_prefill:
        terms.append(_without_prefill(request, share, verdict, candidates))
    return terms


def _alone(
    request: PlacementRequest,
    share: DecodeShare,
    verdict: Verdict,
    pace: Pace,
    candidates: Candidates,
    constants: Constants,
) -> Terms:
    """Terms of a decode worker that computes the prompt itself."""
    worker = share.candidate
    store = candidates.stores.get(worker.identity.kv_namespace) if candidates.stores else None
    found = source(request, worker, pace, store, candidates.now, constants)
    queue_ms = request.ahead * worker.prompts_ms(candidates.now, pace, constants.costs)
    wait_ms, joint = share.wait_ms, worker.joint_prompts
    if joint is None:
        ttft_ms = constants.costs.request_ms + wait_ms + queue_ms + found.ms
    else:
        wait_ms = prompt_begins_ms(worker, joint, found, wait_ms, pace, candidates.now, constants)
        # Other prompts of the rank may wait as well: `queue_ms` says when they end, not how long they take, so it is
        # not added.
        ttft_ms = constants.costs.request_ms + max(wait_ms, queue_ms) + found.ms
    delay_ms = 0.0
    # The delay counts only if a prefill worker could compute the prompt instead.
    if candidates.prefill:
        # The first tokens are computed in a decode step that runs anyway. If there are no others, no other step is
        # needed.
        short, tokens = constants.config.short_prompt_tokens, found.uncached_tokens
        riding, riding_ms = 1.0, found.computing_ms
        if tokens > short:
            riding = short / tokens
            riding_ms = riding * (found.computing_ms - found.steps_ms)
        ttft_ms += riding * share.tpot_ms - riding_ms
        # An idle worker counts as having one request: others arrive while the prompt is computed.
        others = min(share.requests or 1, worker.max_requests) + worker.others_requests
        delay_ms = others * (found.computing_ms - riding_ms)
    return _assemble(share, None, found, ttft_ms, constants.config.interference * delay_ms, wait_ms, verdict)


def _pair(
    request: PlacementRequest, share: DecodeShare, verdict: Verdict, offer: PrefillOffer, constants: Constants
) -> Terms:
    worker = share.candidate
    pushed_blocks = request.prompt_blocks - share.held_blocks - share.host_blocks
    push_ms = pushed_blocks * worker.identity.block_bytes / offer.push_bytes_per_second * 1000
    if _layerwise(request, worker) and _layerwise(request, offer.worker):
        push_ms = max(push_ms - offer.source.ms, push_ms * constants.config.layerwise_rest)
    # Half of the calls are made before the computation, the other half after the KV has landed.
    calls_ms = constants.costs.handover_ms / 2
    # The prefill worker works on its queue until the decode worker calls it.
    ttft_ms = max(share.wait_ms, offer.queue_ms) + offer.source.ms + constants.costs.request_ms + calls_ms
    # The KV lands while a step runs, and the request joins the next step.
    joining_ms = push_ms + calls_ms + share.boundary_ms
    if share.host_blocks:
        # The decode worker reads before it calls the prefill worker.
        ttft_ms += host_read_ms(worker, share.host_blocks, constants)
    if verdict[0] is None:
        verdict = offer.rejection, offer.rejected
    return _assemble(share, offer, offer.source, ttft_ms, joining_ms, share.wait_ms, verdict)


def _layerwise(request: PlacementRequest, worker: CandidateWorker) -> bool:
    """Whether the worker sends, or takes, the KV of such a prompt while later layers are computed."""
    least = worker.identity.layerwise_tokens
    return least is not None and request.query.prompt_tokens >= least


def _without_prefill(request: PlacementRequest, share: DecodeShare, verdict: Verdict, candidates: Candidates) -> Terms:
    """Terms of a decode worker that computes no prompts and has no prefill worker."""
    worker = share.candidate
    if verdict[0] is None and candidates.prefill:
        verdict = (Rejection.NAMESPACE, _mismatch(worker, candidates.prefill[0]))
    elif verdict[0] is None:
        verdict = (Rejection.UNUSABLE, "it cannot compute prompts, and there is no prefill worker")
    nothing = Source(None, 0, request.query.prompt_tokens, 0.0)
    return _assemble(share, None, nothing, share.wait_ms + share.tpot_ms, 0.0, share.wait_ms, verdict)


def _mismatch(worker: CandidateWorker, other: CandidateWorker) -> str:
    differences = worker.identity.kv_namespace.differences(other.identity.kv_namespace)
    return f"no prefill worker has its KV namespace ({other.identity.worker_id} differs: {differences})"


def _assemble(
    share: DecodeShare,
    offer: PrefillOffer | None,
    found: Source,
    ttft_ms: float,
    more_ms: float,
    wait_ms: float,
    verdict: Verdict,
) -> Terms:
    """more_ms: time that counts in addition to the first token and a step for each token; wait_ms: see `Terms`."""
    worker, (rejection, rejected) = share.candidate, verdict
    prefill_worker_id = prefill_rank = None
    drain_ms, disconnected = share.drain_ms, 0 if worker.connected else 1
    if offer is not None:
        prefill_worker_id, prefill_rank = offer.worker.identity.worker_id, offer.worker.rank
        disconnected += not offer.worker.connected
        # A pair takes the request once both workers have room.
        if offer.queue_ms > drain_ms:
            drain_ms = offer.queue_ms
    return Terms(
        worker_id=worker.identity.worker_id,
        prefill_worker_id=prefill_worker_id,
        store=found.store,
        cached_blocks=found.cached_blocks,
        held_blocks=share.held_blocks,
        host_blocks=share.host_blocks,
        uncached_tokens=found.uncached_tokens,
        ttft_ms=ttft_ms,
        tpot_ms=share.tpot_ms,
        slots_left=share.slots_left,
        drain_ms=drain_ms,
        total_ms=ttft_ms + share.output_ms + more_ms,
        requests=share.requests,
        disconnected=disconnected,
        rejection=rejection,
        rejected=rejected,
        rank=worker.rank,
        prefill_rank=prefill_rank,
        prompt_ms=found.ms,
        sparse_tokens=found.sparse_tokens,
        wait_ms=wait_ms,
    )


def _reject(request: PlacementRequest, candidate: CandidateWorker, before: float, constants: Constants) -> Verdict:
    tokens = request.query.prompt_tokens + request.query.max_tokens
    context = min(candidate.identity.context_tokens, candidate.total_blocks * BLOCK_TOKENS)
    if tokens > context:
        return Rejection.CONTEXT, f"{tokens} tokens exceed its context of {context}"
    if candidate.unusable is not None:
        return Rejection.UNUSABLE, candidate.unusable
    if candidate.identity.worker_id in request.query.avoid:
        return Rejection.AVOIDED, "the gateway asked to avoid it"
    if before > constants.config.queue_requests:
        return Rejection.FULL, f"no slot, and its queue is full ({constants.config.queue_requests} requests)"
    return None, ""
