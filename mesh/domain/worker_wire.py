"""Translates workers' reports to protos and back; those who report and those who listen share it."""

from collections.abc import Iterable

from deepmesh.internal.v1 import workers_pb2
from msgspec.structs import asdict

from mesh.blocks import BLOCK_TOKENS
from mesh.domain import wire, workers
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.sparse_prefill import check_sparse_prefill
from mesh.domain.workers import (
    MAX_RANKS,
    HostTierStatus,
    PromptPace,
    RankStatus,
    TransferCounters,
    WorkerIdentity,
    WorkerLoad,
    WorkerRole,
    WorkerSpeed,
    WorkerState,
)
from mesh.errors import InvalidRequest

MAX_NAME_CHARACTERS = 256
# The most UCX transports, or reasons of refusal, that one process may report.
MAX_COUNTED_NAMES = 64
# Counts of an identity that cannot be 0.
_AT_LEAST_ONE = (
    "context_tokens",
    "total_blocks",
    "max_requests",
    "vocabulary_size",
    "block_bytes",
    "max_step_tokens",
    "ranks",
)

ROLES: dict[int, WorkerRole] = {
    workers_pb2.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    workers_pb2.WORKER_ROLE_DECODE: WorkerRole.DECODE,
}
_STATES: dict[int, WorkerState] = {
    workers_pb2.WORKER_STATE_SERVING: WorkerState.SERVING,
    workers_pb2.WORKER_STATE_DRAINING: WorkerState.DRAINING,
    workers_pb2.WORKER_STATE_STALLED: WorkerState.STALLED,
}
_ROLE_NAMES = {role: workers_pb2.WorkerRole.Name(number) for number, role in ROLES.items()}
_TRANSFER_FIELDS = tuple(workers_pb2.TransferStatus.DESCRIPTOR.fields_by_name)
_STATE_NAMES = {state: workers_pb2.WorkerState.Name(number) for number, state in _STATES.items()}


def check_name(field: str, name: str) -> None:
    """Raises InvalidRequest if the name is empty, too long, or not printable in one line of a log."""
    if not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"{field} must have 1 to {MAX_NAME_CHARACTERS} characters", field=field)
    if not name.isprintable():
        raise InvalidRequest(f"{field} must have printable characters only", field=field)


def identity(message: workers_pb2.WorkerIdentity) -> WorkerIdentity:
    """Raises InvalidRequest if the message does not say who the worker is."""
    for field in ("worker_id", "incarnation", "endpoint", "model", "worker_class"):
        check_name(f"identity.{field}", getattr(message, field))
    for field in _AT_LEAST_ONE:
        if getattr(message, field) < 1:
            raise InvalidRequest(f"identity.{field} must be at least 1", field=f"identity.{field}")
    if message.ranks > MAX_RANKS:
        raise InvalidRequest(f"identity.ranks must be at most {MAX_RANKS}", field="identity.ranks")
    for field in ("total_blocks", "max_requests"):
        # Placement divides by each rank's part.
        if getattr(message, field) < message.ranks:
            raise InvalidRequest(f"identity.{field} must be at least identity.ranks", field=f"identity.{field}")
    role(message.role, "identity.role")
    namespace(message.kv_namespace, "identity.kv_namespace")
    known = reported_identity(message)
    if known.sparse_prefill is not None:
        check_sparse_prefill(known.sparse_prefill)
    return known


def reported_identity(message: workers_pb2.WorkerIdentity) -> WorkerIdentity:
    """The worker's identity, from a message that another service has already checked."""
    return WorkerIdentity(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        role=ROLES[message.role],
        endpoint=message.endpoint,
        model=message.model,
        kv_namespace=reported_namespace(message.kv_namespace),
        context_tokens=message.context_tokens,
        total_blocks=message.total_blocks,
        max_requests=message.max_requests,
        can_prefill=message.can_prefill,
        vocabulary_size=message.vocabulary_size,
        block_bytes=message.block_bytes,
        receives_kv=message.receives_kv,
        layerwise_tokens=message.layerwise_tokens or None,
        slot_bytes=message.slot_bytes or None,
        ranks=message.ranks,
        worker_class=message.worker_class,
        sparse_prefill=wire.sparse_prefill(message.sparse_prefill) if message.HasField("sparse_prefill") else None,
        max_step_tokens=message.max_step_tokens,
        prompt_wait_steps=message.prompt_wait_steps,
        divided_tokens=message.divided_tokens or None,
        speed=_speed(message.speed),
    )


def unreadable_kv(registered: Iterable[workers_pb2.WorkerIdentity]) -> dict[str, str]:
    """`workers.unreadable_kv` for the workers in a scheduler's registry. Roles that this version does not know are
    skipped.
    """
    return workers.unreadable_kv(reported_identity(message) for message in registered if message.role in ROLES)


def role(number: int, field: str) -> WorkerRole:
    """Raises InvalidRequest for a number that is no role."""
    if number not in ROLES:
        raise InvalidRequest(f"{field} must be PREFILL or DECODE", field=field)
    return ROLES[number]


def identity_message(worker: WorkerIdentity) -> workers_pb2.WorkerIdentity:
    translated = {
        "role": _ROLE_NAMES[worker.role],
        "kv_namespace": namespace_message(worker.kv_namespace),
        "sparse_prefill": None if worker.sparse_prefill is None else wire.sparse_prefill_message(worker.sparse_prefill),
        "speed": _speed_message(worker.speed),
    }
    return workers_pb2.WorkerIdentity(**asdict(worker) | translated)


def namespace(message: workers_pb2.KvNamespace, field: str = "kv_namespace") -> KvNamespace:
    """Raises InvalidRequest if the message names no namespace, or has blocks of another size."""
    if message.block_tokens != BLOCK_TOKENS:
        raise InvalidRequest(f"blocks must be of {BLOCK_TOKENS} tokens", field=f"{field}.block_tokens")
    for part in ("weights_fingerprint", "dtype", "layout"):
        check_name(f"{field}.{part}", getattr(message, part))
    if message.draft_layers >= max(message.layers, 1):
        raise InvalidRequest("a block has more layers than those of drafts", field=f"{field}.draft_layers")
    return reported_namespace(message)


def reported_namespace(message: workers_pb2.KvNamespace) -> KvNamespace:
    """The namespace, from a message that another service has already checked."""
    return KvNamespace(
        weights_fingerprint=message.weights_fingerprint,
        dtype=message.dtype,
        layers=message.layers,
        layout=message.layout,
        scale=message.scale,
        block_tokens=message.block_tokens,
        draft_layers=message.draft_layers,
    )


def namespace_message(kv: KvNamespace) -> workers_pb2.KvNamespace:
    return workers_pb2.KvNamespace(**asdict(kv))


def state(number: int) -> WorkerState:
    """A state that this version does not know counts as draining."""
    return _STATES.get(number, WorkerState.DRAINING)


def role_name(role: WorkerRole) -> str:
    return _ROLE_NAMES[role]


def state_name(state: WorkerState) -> str:
    """The name of the enum value, which constructors of messages accept."""
    return _STATE_NAMES[state]


def load(message: workers_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        queued_prefill_tokens=message.queued_prefill_tokens,
        free_blocks=message.free_blocks,
        prefill_tokens_per_second=_measured(message.prefill_tokens_per_second),
        decode_step_ms=_measured(message.decode_step_ms),
        mean_output_tokens=_measured(message.mean_output_tokens),
        decode_step_requests=_measured(message.decode_step_requests),
        push_bytes_per_second=_measured(message.push_bytes_per_second),
        expert_imbalance=message.expert_imbalance if message.HasField("expert_imbalance") else None,
        experts_moved=message.experts_moved,
        exact_prompts=_prompt_pace(message.exact_prompts),
        sparse_prompts=_prompt_pace(message.sparse_prompts),
        queued_sparse_tokens=message.queued_sparse_tokens,
        waiting_blocks=message.waiting_blocks,
        even_step_tokens=message.even_step_tokens or None,
        host_tier=_host_tier(message.host_tier) if message.HasField("host_tier") else None,
    )


def load_message(load: WorkerLoad) -> workers_pb2.WorkerLoad:
    translated = {
        "exact_prompts": _prompt_pace_message(load.exact_prompts),
        "sparse_prompts": _prompt_pace_message(load.sparse_prompts),
        "host_tier": None if load.host_tier is None else workers_pb2.HostTierStatus(**asdict(load.host_tier)),
    }
    return workers_pb2.WorkerLoad(**asdict(load) | translated)


def _host_tier(message: workers_pb2.HostTierStatus) -> HostTierStatus:
    return HostTierStatus(
        total_blocks=message.total_blocks,
        used_blocks=message.used_blocks,
        written_blocks=message.written_blocks,
        read_blocks=message.read_blocks,
        read_bytes_per_second=_measured(message.read_bytes_per_second),
    )


def transfers(message: workers_pb2.TransferStatus) -> TransferCounters:
    """Raises InvalidRequest if a map has too many entries."""
    for field in ("received_bytes", "sent_bytes", "refused"):
        if len(getattr(message, field)) > MAX_COUNTED_NAMES:
            raise InvalidRequest(f"transfers.{field} has at most {MAX_COUNTED_NAMES} entries", field=field)
    return TransferCounters(
        open_landings=message.open_landings,
        open_pushes=message.open_pushes,
        open_fetches=message.open_fetches,
        total_slots=message.total_slots,
        free_slots=message.free_slots,
        quarantined_slots=message.quarantined_slots,
        received_bytes=dict(message.received_bytes),
        sent_bytes=dict(message.sent_bytes),
        refused=dict(message.refused),
        fetches=message.fetches,
        fetched_blocks=message.fetched_blocks,
        fetch_bytes_per_second=_measured(message.fetch_bytes_per_second),
        disk_fetch_bytes_per_second=_measured(message.disk_fetch_bytes_per_second),
    )


def transfers_message(counters: TransferCounters) -> workers_pb2.TransferStatus:
    # A process counts some things for its own metrics alone.
    return workers_pb2.TransferStatus(**{name: getattr(counters, name) for name in _TRANSFER_FIELDS})


def rank(message: workers_pb2.RankStatus) -> RankStatus:
    """Raises InvalidRequest if a map has too many entries."""
    return RankStatus(load(message.load), transfers(message.transfers), message.cached_blocks)


def rank_message(rank: RankStatus) -> workers_pb2.RankStatus:
    return workers_pb2.RankStatus(
        load=load_message(rank.load),
        transfers=transfers_message(rank.transfers),
        cached_blocks=rank.cached_blocks,
    )


def _speed(message: workers_pb2.WorkerSpeed) -> WorkerSpeed | None:
    """None unless all of it was measured."""
    step_ms, requests = _measured(message.decode_step_ms), _measured(message.decode_step_requests)
    prompts = _prompt_pace(message.prompts)
    if step_ms is None or requests is None or prompts is None:
        return None
    return WorkerSpeed(step_ms, requests, prompts)


def _speed_message(speed: WorkerSpeed | None) -> workers_pb2.WorkerSpeed | None:
    if speed is None:
        return None
    return workers_pb2.WorkerSpeed(
        decode_step_ms=speed.decode_step_ms,
        decode_step_requests=speed.decode_step_requests,
        prompts=_prompt_pace_message(speed.prompts),
    )


def _prompt_pace(message: workers_pb2.PromptPace) -> PromptPace | None:
    rate = _measured(message.tokens_per_second)
    if rate is None:
        return None
    return PromptPace(rate, _measured(message.context_tokens) or 0.0, _measured(message.step_tokens))


def _prompt_pace_message(pace: PromptPace | None) -> workers_pb2.PromptPace | None:
    return None if pace is None else workers_pb2.PromptPace(**asdict(pace))


def _measured(value: float) -> float | None:
    """A rate or a mean; an impossible value (0, negative, infinite, NaN) counts as unknown."""
    return value if 0 < value < float("inf") else None
