"""A worker's status as protos. No rank imports this module."""

from deepmesh.internal.v1 import scheduler_pb2

from mesh.domain import worker_wire
from mesh.domain.workers import MAX_RANKS, POOL_BITS, WorkerIdentity
from worker.status_report import Report


def status_message(report: Report, sender: WorkerIdentity | None) -> scheduler_pb2.ReportStatusRequest:
    """`sender` is set only in a stream's first message."""
    message = scheduler_pb2.ReportStatusRequest(
        identity=worker_wire.identity_message(sender) if sender else None,
        state=worker_wire.state_name(report.state),
        load=worker_wire.load_message(report.load),
        transfers=worker_wire.transfers_message(report.transfers),
        leaving=report.leaving,
        ranks=[worker_wire.rank_message(rank) for rank in report.ranks],
    )
    if report.snapshot or report.stored or report.removed:
        has_host = report.load.host_tier is not None
        events = scheduler_pb2.KvEvents(
            snapshot=report.snapshot,
            stored=report.stored,
            removed=report.removed,
            holders=[mask & POOL_BITS for mask in report.holders],
            host_holders=[mask >> MAX_RANKS for mask in report.holders] if has_host else [],
        )
        message.kv_events.CopyFrom(events)
    return message
