"""Messages in and out: checked, bounded, and turned into the scheduler's own types."""

from collections.abc import Sequence

from deepmesh.v1 import common_pb2, scheduler_pb2

from mesh.blocks import BLOCK_TOKENS, HASH_BYTES
from mesh.errors import InvalidRequest
from scheduler.coordinator import PlacementAnswer, PlacementCall
from scheduler.decisions import Decision, Outcome
from scheduler.placement import PlacementRequest, Terms
from scheduler.registry import Registry, Worker
from scheduler.workers import KvNamespace, WorkerIdentity, WorkerLoad, WorkerRole, WorkerState

MAX_NAME_CHARACTERS = 256
MAX_AVOIDED_WORKERS = 1024
# A million tokens of prompt.
MAX_PROMPT_BLOCKS = 16_384
MAX_CACHED_PREFIXES = 8
MAX_LISTED_DECISIONS = 1000
DEFAULT_LISTED_DECISIONS = 100

_ROLES: dict[int, WorkerRole] = {
    common_pb2.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    common_pb2.WORKER_ROLE_DECODE: WorkerRole.DECODE,
}
_STATES: dict[int, WorkerState] = {
    common_pb2.WORKER_STATE_SERVING: WorkerState.SERVING,
    common_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
}
_OUTCOMES: dict[int, Outcome] = {
    scheduler_pb2.PLACEMENT_OUTCOME_FINISHED: Outcome.FINISHED,
    scheduler_pb2.PLACEMENT_OUTCOME_CANCELLED: Outcome.CANCELLED,
    scheduler_pb2.PLACEMENT_OUTCOME_REFUSED: Outcome.REFUSED,
    scheduler_pb2.PLACEMENT_OUTCOME_LOST: Outcome.LOST,
    scheduler_pb2.PLACEMENT_OUTCOME_FAILED: Outcome.FAILED,
}
_ROLE_NAMES = {role: common_pb2.WorkerRole.Name(number) for number, role in _ROLES.items()}
_STATE_NAMES = {state: common_pb2.WorkerState.Name(number) for number, state in _STATES.items()}
_OUTCOME_NAMES = {outcome: scheduler_pb2.PlacementOutcome.Name(number) for number, outcome in _OUTCOMES.items()}


def placement_call(message: scheduler_pb2.PlaceRequest) -> PlacementCall:
    """Raises InvalidRequest."""
    _check_name("request_id", message.request_id)
    _check_name("model", message.model)
    if message.prompt_tokens < 1:
        raise InvalidRequest("prompt_tokens must be at least 1", field="prompt_tokens")
    if message.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if len(message.avoid_worker_ids) > MAX_AVOIDED_WORKERS:
        raise InvalidRequest(f"at most {MAX_AVOIDED_WORKERS} workers can be avoided", field="avoid_worker_ids")
    most = min(MAX_PROMPT_BLOCKS, message.prompt_tokens // BLOCK_TOKENS)
    if len(message.block_hashes) > most:
        raise InvalidRequest(
            f"{len(message.block_hashes)} block hashes for {message.prompt_tokens} prompt tokens: at most {most}",
            field="block_hashes",
        )
    request = PlacementRequest(message.prompt_tokens, message.max_tokens, frozenset(message.avoid_worker_ids))
    hashes = block_hashes(message.block_hashes, "block_hashes")
    return PlacementCall(message.request_id, message.attempt, message.model, request, hashes)


def place_response(answer: PlacementAnswer) -> scheduler_pb2.PlaceResponse:
    worker, chosen = answer.worker, answer.chosen
    cached = sorted((t for t in answer.terms if t.cached_blocks), key=lambda t: (-t.cached_blocks, t.worker_id))
    return scheduler_pb2.PlaceResponse(
        decode=scheduler_pb2.WorkerTarget(
            worker_id=worker.worker_id, incarnation=worker.incarnation, endpoint=worker.endpoint
        ),
        cached_prefixes=[
            scheduler_pb2.CachedPrefix(source_id=term.worker_id, blocks=term.cached_blocks)
            for term in cached[:MAX_CACHED_PREFIXES]
        ],
        predicted_ttft_ms=chosen.ttft_ms,
        predicted_tpot_ms=chosen.tpot_ms,
        reason=answer.reason,
    )


def outcome(message: scheduler_pb2.ReportOutcomeRequest) -> Outcome:
    """Raises InvalidRequest."""
    known = _OUTCOMES.get(message.outcome)
    if known is None:
        raise InvalidRequest("outcome must be one of PlacementOutcome's named values", field="outcome")
    return known


def identity(message: common_pb2.WorkerIdentity) -> WorkerIdentity:
    """Raises InvalidRequest where a worker's first message does not say who it is."""
    for field in ("worker_id", "incarnation", "endpoint", "model"):
        _check_name(f"identity.{field}", getattr(message, field))
    for field in ("context_tokens", "total_blocks", "max_requests"):
        if getattr(message, field) < 1:
            raise InvalidRequest(f"identity.{field} must be at least 1", field=f"identity.{field}")
    role, namespace = _ROLES.get(message.role), message.kv_namespace
    if role is None:
        raise InvalidRequest("identity.role must be PREFILL or DECODE", field="identity.role")
    if namespace.block_tokens != BLOCK_TOKENS:
        raise InvalidRequest(f"blocks must be of {BLOCK_TOKENS} tokens", field="identity.kv_namespace.block_tokens")
    for field in ("weights_fingerprint", "dtype", "layout"):
        _check_name(f"identity.kv_namespace.{field}", getattr(namespace, field))
    return WorkerIdentity(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        role=role,
        endpoint=message.endpoint,
        model=message.model,
        kv_namespace=KvNamespace(
            weights_fingerprint=namespace.weights_fingerprint,
            dtype=namespace.dtype,
            scale=namespace.scale,
            layers=namespace.layers,
            block_tokens=namespace.block_tokens,
            layout=namespace.layout,
        ),
        context_tokens=message.context_tokens,
        total_blocks=message.total_blocks,
        max_requests=message.max_requests,
        can_prefill=message.can_prefill,
        vocabulary_size=message.vocabulary_size,
    )


def state(number: int) -> WorkerState:
    """A state that this scheduler does not know takes nothing new."""
    return _STATES.get(number, WorkerState.DRAINING)


def load(message: common_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_prefill_tokens=message.queued_prefill_tokens,
        free_blocks=message.free_blocks,
        prefill_tokens_per_second=_measured(message.prefill_tokens_per_second),
        decode_step_ms=_measured(message.decode_step_ms),
        mean_output_tokens=_measured(message.mean_output_tokens),
    )


def block_hashes(hashes: Sequence[bytes], field: str) -> list[bytes]:
    """Raises InvalidRequest where one is not a block's hash."""
    if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
        raise InvalidRequest(f"a block hash is {HASH_BYTES} bytes", field=field)
    return list(hashes)


def watch_response(registry: Registry) -> scheduler_pb2.WatchWorkersResponse:
    response = scheduler_pb2.WatchWorkersResponse(workers=[_status(w, registry) for w in registry.workers()])
    response.lease.FromMilliseconds(int(registry.lease_seconds * 1000))
    return response


def decision(kept: Decision) -> scheduler_pb2.Decision:
    message = scheduler_pb2.Decision(
        request_id=kept.request_id,
        attempt=kept.attempt,
        worker_id=kept.worker_id or "",
        reason=kept.reason,
        candidates=[_candidate(term, kept.worker_id) for term in kept.terms],
        outcome=_OUTCOME_NAMES[kept.outcome] if kept.outcome else None,
    )
    message.time.FromNanoseconds(int(kept.time * 1e9))
    return message


def _candidate(term: Terms, chosen: str | None) -> scheduler_pb2.Candidate:
    rejected = term.rejected
    if not rejected and term.worker_id != chosen:
        rejected = "another is predicted to finish it earlier" if term.connected else "its status stream is broken"
    return scheduler_pb2.Candidate(
        worker_id=term.worker_id,
        cached_blocks=term.cached_blocks,
        predicted_ttft_ms=term.ttft_ms,
        predicted_tpot_ms=term.tpot_ms,
        slots_left=term.slots_left,
        rejected=rejected,
    )


def _status(worker: Worker, registry: Registry) -> scheduler_pb2.WorkerStatus:
    who, load = worker.identity, worker.load
    status = scheduler_pb2.WorkerStatus(
        identity=common_pb2.WorkerIdentity(
            worker_id=who.worker_id,
            incarnation=who.incarnation,
            role=_ROLE_NAMES[who.role],
            endpoint=who.endpoint,
            model=who.model,
            kv_namespace=common_pb2.KvNamespace(
                weights_fingerprint=who.kv_namespace.weights_fingerprint,
                dtype=who.kv_namespace.dtype,
                scale=who.kv_namespace.scale,
                layers=who.kv_namespace.layers,
                block_tokens=who.kv_namespace.block_tokens,
                layout=who.kv_namespace.layout,
            ),
            context_tokens=who.context_tokens,
            total_blocks=who.total_blocks,
            max_requests=who.max_requests,
            can_prefill=who.can_prefill,
            vocabulary_size=who.vocabulary_size,
        ),
        state=_STATE_NAMES[worker.state],
        load=common_pb2.WorkerLoad(
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            queued_prefill_tokens=load.queued_prefill_tokens,
            free_blocks=load.free_blocks,
            prefill_tokens_per_second=load.prefill_tokens_per_second,
            decode_step_ms=load.decode_step_ms,
            mean_output_tokens=load.mean_output_tokens,
        ),
        cached_blocks=len(worker.cached),
    )
    status.lease_remaining.FromMilliseconds(int(registry.lease_remaining(worker) * 1000))
    return status


def _measured(value: float) -> float:
    """A rate or a mean; what is no such thing (negative, infinite, NaN) reads as unknown."""
    return value if 0 <= value < float("inf") else 0.0


def _check_name(field: str, name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"{field} must have 1 to {MAX_NAME_CHARACTERS} characters", field=field)
