"""Between the gateway's own types and the protos of the scheduler and the decode workers."""

from collections.abc import Sequence

from deepmesh.internal.v1 import decode_pb2, scheduler_pb2, targets_pb2, workers_pb2
from deepmesh.v1 import common_pb2

from gateway.generation import FinishReason, Generation, PositionLogprobs
from gateway.placement import AttemptReport, Outcome, Placement, PlacementQuery, StoreTarget
from gateway.requests import Sampling
from gateway.workers import Target, Worker
from mesh.workers import WorkerRole

# Nearest that a 32-bit float on the wire comes to "only the most likely token" without reading as 0, which is 1.
SMALLEST_TOP_P = 1e-6
LARGEST_DEADLINE_MS = 2**32 - 1

_ROLES: dict[int, WorkerRole] = {
    workers_pb2.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    workers_pb2.WORKER_ROLE_DECODE: WorkerRole.DECODE,
}
_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_OUTCOMES = {
    Outcome.FINISHED: scheduler_pb2.PLACEMENT_OUTCOME_FINISHED,
    Outcome.CANCELLED: scheduler_pb2.PLACEMENT_OUTCOME_CANCELLED,
    Outcome.REFUSED: scheduler_pb2.PLACEMENT_OUTCOME_REFUSED,
    Outcome.LOST: scheduler_pb2.PLACEMENT_OUTCOME_LOST,
    Outcome.FAILED: scheduler_pb2.PLACEMENT_OUTCOME_FAILED,
}


def submission(
    stream_id: int, attempt: int, placement: Placement, generation: Generation, now: float
) -> decode_pb2.AttachRequest:
    """The request as its worker gets it: prompt and tokens so far, and what remains to generate."""
    request = generation.request
    message = decode_pb2.Submission(
        stream_id=stream_id,
        request_id=request.request_id,
        attempt=attempt,
        token_ids=generation.log(),
        sampling=_sampling(request.sampling),
        stop=decode_pb2.StopConditions(
            max_tokens=generation.remaining_tokens, token_ids=request.stop_token_ids, ignore_eos=request.ignore_eos
        ),
        cache_salt=request.cache_salt,
        deadline_ms=min(max(int(1000 * (request.deadline - now)), 1), LARGEST_DEADLINE_MS),
    )
    if placement.prefill is not None:
        message.prefill.CopyFrom(_worker_target(placement.prefill))
    if placement.store is not None:
        store = targets_pb2.StoreTarget(store_id=placement.store.store_id, blocks=placement.store.blocks)
        message.store.CopyFrom(store)
    return decode_pb2.AttachRequest(submission=message)


def position_logprobs(entries: Sequence[common_pb2.PositionLogprobs]) -> list[PositionLogprobs]:
    return [
        PositionLogprobs(entry.logprob, tuple((token.token_id, token.logprob) for token in entry.top))
        for entry in entries
    ]


def finish_reason(reason: common_pb2.FinishReason) -> FinishReason:
    """A reason that this version does not know reads as a stop."""
    return _FINISH_REASONS.get(reason, FinishReason.STOP)


def place_request(query: PlacementQuery) -> scheduler_pb2.PlaceRequest:
    return scheduler_pb2.PlaceRequest(
        request_id=query.request_id,
        attempt=query.attempt,
        model=query.model,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        block_hashes=query.block_hashes,
        avoid_worker_ids=sorted(query.avoid),
    )


def placement(response: scheduler_pb2.PlaceResponse) -> Placement:
    prefill = _target(response.prefill) if response.HasField("prefill") else None
    store = StoreTarget(response.store.store_id, response.store.blocks) if response.HasField("store") else None
    return Placement(_target(response.decode), prefill, store)


def outcome_request(report: AttemptReport) -> scheduler_pb2.ReportOutcomeRequest:
    return scheduler_pb2.ReportOutcomeRequest(
        request_id=report.request_id,
        attempt=report.attempt,
        worker_id=report.worker_id,
        outcome=_OUTCOMES[report.outcome],
        output_tokens=report.output_tokens,
        cached_tokens=report.cached_tokens,
        ttft_ms=report.time_to_first_token_ms,
        tpot_ms=report.time_per_output_token_ms,
    )


def workers(response: scheduler_pb2.WatchWorkersResponse) -> list[Worker]:
    """Those of a role that this version knows."""
    return [
        _worker(status, _ROLES[status.identity.role]) for status in response.workers if status.identity.role in _ROLES
    ]


def _worker(status: scheduler_pb2.WorkerStatus, role: WorkerRole) -> Worker:
    identity = status.identity
    return Worker(
        target=Target(identity.worker_id, identity.incarnation, identity.endpoint, identity.slot_bytes),
        role=role,
        model=identity.model,
        kv_namespace=identity.kv_namespace.SerializeToString(deterministic=True),
        can_prefill=identity.can_prefill,
        serving=status.state == workers_pb2.WORKER_STATE_SERVING,
        context_tokens=identity.context_tokens,
        vocabulary_size=identity.vocabulary_size or None,
        max_requests=identity.max_requests,
        requests=status.load.running_requests + status.load.waiting_requests,
    )


def _target(target: targets_pb2.WorkerTarget) -> Target:
    return Target(target.worker_id, target.incarnation, target.endpoint, target.slot_bytes)


def _worker_target(target: Target) -> targets_pb2.WorkerTarget:
    return targets_pb2.WorkerTarget(
        worker_id=target.worker_id,
        incarnation=target.incarnation,
        endpoint=target.endpoint,
        slot_bytes=target.slot_bytes,
    )


def _sampling(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=max(sampling.top_p, SMALLEST_TOP_P),
        top_k=sampling.top_k,
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs,
    )
