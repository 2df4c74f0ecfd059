"""Turns the scheduler's messages into what the page shows."""

from collections.abc import Sequence

from deepmesh.internal.v1 import scheduler_pb2, workers_pb2

from gateway.page.view import DecisionView, LoadView, Moves, StoreView, TierView, WorkerView
from mesh.domain.worker_wire import unreadable_kv

# Most rejected candidates that are listed with the chosen one.
MOST_REJECTED = 8


def workers(statuses: Sequence[scheduler_pb2.WorkerStatus]) -> list[WorkerView]:
    unreadable = unreadable_kv(status.identity for status in statuses)
    return [_worker(status, unreadable.get(status.identity.worker_id, "")) for status in statuses]


def _worker(status: scheduler_pb2.WorkerStatus, kv_unreadable: str) -> WorkerView:
    identity, load = status.identity, status.load
    return WorkerView(
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        role=_word(workers_pb2.WorkerRole.Name(identity.role)),
        model=identity.model,
        state=_word(workers_pb2.WorkerState.Name(status.state)),
        silent=status.silent,
        kv_unreadable=kv_unreadable,
        lease_ms=status.lease_remaining.ToMilliseconds(),
        load=_load(load, status.cached_blocks, identity, 1),
        prefill_tokens_per_second=round(load.prefill_tokens_per_second),
        decode_step_ms=round(load.decode_step_ms, 2),
        moves=_moves(status.transfers),
        ranks=[_load(each.load, each.cached_blocks, identity, identity.ranks) for each in status.ranks],
    )


def _load(
    load: workers_pb2.WorkerLoad, cached_blocks: int, identity: workers_pb2.WorkerIdentity, parts: int
) -> LoadView:
    """The load of a worker, or of one of its `parts` equal parts."""
    return LoadView(
        running=load.running_requests,
        waiting=load.waiting_requests,
        max_requests=identity.max_requests // parts,
        queued_prefill_tokens=load.queued_prefill_tokens,
        free_blocks=load.free_blocks,
        total_blocks=identity.total_blocks // parts,
        cached_blocks=cached_blocks,
    )


def store(status: scheduler_pb2.StoreStatus) -> StoreView:
    return StoreView(
        store_id=status.store_id,
        endpoint=status.endpoint,
        tiers=[TierView(tier.name, tier.used_blocks, tier.total_blocks, tier.block_bytes) for tier in status.tiers],
        lookups=status.lookups,
        hits=status.hits,
        attached_workers=status.attached_workers,
        moves=_moves(status.transfers),
    )


def decision(message: scheduler_pb2.Decision) -> DecisionView:
    taken = next((each for each in message.candidates if not each.rejected), scheduler_pb2.Candidate())
    rejected = [f"{_name(each)}: {each.rejected}" for each in message.candidates if each.rejected]
    return DecisionView(
        time=message.time.ToMilliseconds() / 1000,
        request_id=message.request_id,
        attempt=message.attempt,
        worker_id=message.worker_id,
        rank=taken.rank if taken.HasField("rank") else None,
        prefill_worker_id=taken.prefill_worker_id,
        store_id=taken.store_id,
        reason=message.reason,
        outcome=_word(scheduler_pb2.PlacementOutcome.Name(message.outcome)) if message.outcome else "",
        rejected=rejected[:MOST_REJECTED],
    )


def _moves(status: workers_pb2.TransferStatus) -> Moves:
    return Moves(
        received_bytes=sum(status.received_bytes.values()),
        sent_bytes=sum(status.sent_bytes.values()),
        transports=sorted({*status.received_bytes, *status.sent_bytes}),
        open=status.open_landings + status.open_pushes + status.open_fetches,
        free_slots=status.free_slots,
        total_slots=status.total_slots,
        fetched_blocks=status.fetched_blocks,
    )


def _name(candidate: scheduler_pb2.Candidate) -> str:
    rank = f" rank {candidate.rank}" if candidate.HasField("rank") else ""
    return " → ".join(filter(None, (candidate.prefill_worker_id, candidate.worker_id + rank)))


def _word(name: str) -> str:
    """The last word of an enum's name: WORKER_STATE_SERVING gives "serving"."""
    return name.rpartition("_")[2].lower()
