"""The scheduler's messages, in and out: checked, bounded, and translated to its own types."""

from collections.abc import Mapping, Sequence

import msgspec
from deepmesh.internal.v1 import kvstore_pb2, scheduler_pb2

from mesh.blocks import BLOCK_TOKENS, HASH_BYTES
from mesh.domain import placement_wire, worker_wire
from mesh.domain.placement import PlacementQuery
from mesh.domain.sparse_prefill import check_sparse_prefill
from mesh.domain.workers import MAX_RANKS, WorkerRole
from mesh.errors import InvalidRequest
from scheduler.coordinator import ExplainedPlacement
from scheduler.decisions import Decision
from scheduler.live_worker import Worker
from scheduler.placement.terms import Terms
from scheduler.registry import Registry
from scheduler.scaling.replicas import WantedReplicas
from scheduler.stores import Store, Stores

MAX_AVOIDED_WORKERS = 1024
# Enough for a prompt of a million tokens.
MAX_PROMPT_BLOCKS = 16_384
MAX_CACHED_PREFIXES = 8
MAX_LISTED_DECISIONS = 1000
DEFAULT_LISTED_DECISIONS = 100


def placement_query(message: scheduler_pb2.PlaceRequest) -> PlacementQuery:
    """Raises InvalidRequest."""
    worker_wire.check_name("request_id", message.request_id)
    worker_wire.check_name("generation_id", message.generation_id)
    worker_wire.check_name("model", message.model)
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
    block_hashes(message.block_hashes, "block_hashes")
    query = placement_wire.query(message)
    if query.sparse is not None:
        check_sparse_prefill(query.sparse)
    return query


def place_response(answer: ExplainedPlacement) -> scheduler_pb2.PlaceResponse:
    response = placement_wire.placement_message(answer.placement)
    response.cached_prefixes.extend(_cached_prefixes(answer.cached))
    response.predicted_ttft_ms = answer.chosen.ttft_ms
    response.predicted_tpot_ms = answer.chosen.tpot_ms
    response.reason = answer.reason
    return response


def holders(events: scheduler_pb2.KvEvents) -> Sequence[int]:
    """For each stored block, which ranks hold it (see `mesh.domain.workers.POOL_BITS`); empty if the worker's only rank
    holds all of them in its pool. Raises InvalidRequest if there are masks for some of them only.
    """
    for field in ("holders", "host_holders"):
        if len(getattr(events, field)) not in (0, len(events.stored)):
            raise InvalidRequest(f"{field} are one for each of stored", field=f"kv_events.{field}")
    if not events.host_holders:
        return events.holders
    if len(events.holders) != len(events.host_holders):
        raise InvalidRequest("host_holders come with holders", field="kv_events.holders")
    return [pool | host << MAX_RANKS for pool, host in zip(events.holders, events.host_holders, strict=True)]


def block_hashes(hashes: Sequence[bytes], field: str) -> list[bytes]:
    """Raises InvalidRequest if one is not the hash of a block."""
    if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
        raise InvalidRequest(f"a block hash is {HASH_BYTES} bytes", field=field)
    return list(hashes)


def watch_response(registry: Registry, stores: Stores) -> scheduler_pb2.WatchWorkersResponse:
    response = scheduler_pb2.WatchWorkersResponse(
        workers=[_status(worker, registry) for worker in registry.workers()],
        stores=[_store_status(store) for store in stores],
    )
    response.lease.FromMilliseconds(int(registry.lease_seconds * 1000))
    return response


def decision(kept: Decision) -> scheduler_pb2.Decision:
    message = scheduler_pb2.Decision(
        request_id=kept.query.request_id,
        attempt=kept.query.attempt,
        worker_id=kept.chosen.worker_id if kept.chosen else "",
        reason=kept.reason,
        candidates=[_candidate(term, kept.chosen) for term in kept.terms],
        outcome=placement_wire.outcome_name(kept.outcome) if kept.outcome else None,
    )
    message.time.FromNanoseconds(int(kept.time * 1e9))
    return message


def role_scaling(model: str, role: WorkerRole, serving: int, wanted: WantedReplicas) -> scheduler_pb2.RoleScaling:
    return scheduler_pb2.RoleScaling(
        model=model,
        role=worker_wire.role_name(role),
        serving_replicas=serving,
        wanted_replicas=wanted.replicas,
        reason=wanted.reason,
    )


def _cached_prefixes(cached: Mapping[str, int]) -> list[scheduler_pb2.CachedPrefix]:
    longest = sorted((-blocks, source) for source, blocks in cached.items() if blocks)[:MAX_CACHED_PREFIXES]
    return [scheduler_pb2.CachedPrefix(source_id=source, blocks=-blocks) for blocks, source in longest]


def _candidate(term: Terms, chosen: Terms | None) -> scheduler_pb2.Candidate:
    rejected = term.rejected
    if not rejected and term != chosen:
        rejected = "a status stream is broken" if term.disconnected else "another is predicted to cost less time"
    return scheduler_pb2.Candidate(
        worker_id=term.worker_id,
        prefill_worker_id=term.prefill_worker_id or "",
        store_id=term.store.store_id if term.store else "",
        cached_blocks=term.cached_blocks,
        predicted_ttft_ms=term.ttft_ms,
        predicted_tpot_ms=term.tpot_ms,
        slots_left=term.slots_left,
        rejected=rejected,
        rank=term.rank,
    )


def _store_status(store: Store) -> scheduler_pb2.StoreStatus:
    status = store.status
    if status is None:
        return scheduler_pb2.StoreStatus(endpoint=store.endpoint)
    return scheduler_pb2.StoreStatus(
        endpoint=store.endpoint,
        store_id=status.store_id,
        tiers=[kvstore_pb2.TierStatus(**msgspec.structs.asdict(tier)) for tier in status.tiers],
        lookups=status.lookups,
        hits=status.hits,
        attached_workers=status.attached_workers,
        transfers=worker_wire.transfers_message(status.transfers),
    )


def _status(worker: Worker, registry: Registry) -> scheduler_pb2.WorkerStatus:
    status = scheduler_pb2.WorkerStatus(
        identity=worker_wire.identity_message(worker.identity),
        state=worker_wire.state_name(worker.state),
        load=worker_wire.load_message(worker.load),
        cached_blocks=worker.pool_blocks,
        transfers=worker_wire.transfers_message(worker.transfers),
        silent=not worker.connected,
    )
    if len(worker.ranks) > 1:
        status.ranks.extend(worker_wire.rank_message(rank.status) for rank in worker.ranks)
    status.lease_remaining.FromMilliseconds(int(registry.lease_remaining(worker) * 1000))
    return status
