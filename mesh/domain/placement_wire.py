"""Translates placement's question, answer and reports to protos and back; gateway and scheduler share it."""

from deepmesh.internal.v1 import scheduler_pb2

from mesh.domain import wire
from mesh.domain.placement import AttemptOutcome, AttemptReport, Placement, PlacementQuery
from mesh.errors import InvalidRequest

_OUTCOMES: dict[int, AttemptOutcome] = {
    scheduler_pb2.PLACEMENT_OUTCOME_FINISHED: AttemptOutcome.FINISHED,
    scheduler_pb2.PLACEMENT_OUTCOME_CANCELLED: AttemptOutcome.CANCELLED,
    scheduler_pb2.PLACEMENT_OUTCOME_REFUSED: AttemptOutcome.REFUSED,
    scheduler_pb2.PLACEMENT_OUTCOME_LOST: AttemptOutcome.LOST,
    scheduler_pb2.PLACEMENT_OUTCOME_FAILED: AttemptOutcome.FAILED,
}
_OUTCOME_NAMES = {outcome: scheduler_pb2.PlacementOutcome.Name(number) for number, outcome in _OUTCOMES.items()}


def query(message: scheduler_pb2.PlaceRequest) -> PlacementQuery:
    """The message as it is; the scheduler checks it."""
    return PlacementQuery(
        generation_id=message.generation_id,
        attempt=message.attempt,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        block_hashes=list(message.block_hashes),
        avoid=frozenset(message.avoid_worker_ids),
        share=wire.share(message.share),
        sparse=wire.sparse_prefill(message.sparse_prefill) if message.HasField("sparse_prefill") else None,
        request_id=message.request_id,
    )


def query_message(query: PlacementQuery) -> scheduler_pb2.PlaceRequest:
    return scheduler_pb2.PlaceRequest(
        request_id=query.request_id,
        attempt=query.attempt,
        model=query.model,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        block_hashes=query.block_hashes,
        avoid_worker_ids=sorted(query.avoid),
        share=wire.share_message(query.share),
        generation_id=query.generation_id,
        sparse_prefill=None if query.sparse is None else wire.sparse_prefill_message(query.sparse),
    )


def placement(message: scheduler_pb2.PlaceResponse) -> Placement:
    return Placement(
        decode=wire.worker_target(message.decode),
        prefill=wire.worker_target(message.prefill) if message.HasField("prefill") else None,
        store=wire.store_target(message.store) if message.HasField("store") else None,
        decode_rank=message.decode_rank if message.HasField("decode_rank") else None,
        prefill_rank=message.prefill_rank if message.HasField("prefill_rank") else None,
    )


def placement_message(placement: Placement) -> scheduler_pb2.PlaceResponse:
    """An answer without its reasons."""
    return scheduler_pb2.PlaceResponse(
        decode=wire.worker_target_message(placement.decode),
        prefill=None if placement.prefill is None else wire.worker_target_message(placement.prefill),
        store=None if placement.store is None else wire.store_target_message(placement.store),
        decode_rank=placement.decode_rank,
        prefill_rank=placement.prefill_rank,
    )


def outcome_name(outcome: AttemptOutcome) -> str:
    """The name of the enum value, which constructors of messages accept."""
    return _OUTCOME_NAMES[outcome]


def report(message: scheduler_pb2.ReportOutcomeRequest) -> AttemptReport:
    """Raises InvalidRequest if the message names no outcome."""
    outcome = _OUTCOMES.get(message.outcome)
    if outcome is None:
        raise InvalidRequest("outcome must be one of PlacementOutcome's named values", field="outcome")
    return AttemptReport(
        generation_id=message.generation_id,
        attempt=message.attempt,
        outcome=outcome,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens,
        time_to_first_token_ms=message.ttft_ms,
        time_per_output_token_ms=message.tpot_ms,
        request_id=message.request_id,
        worker_id=message.worker_id,
    )


def report_message(report: AttemptReport) -> scheduler_pb2.ReportOutcomeRequest:
    return scheduler_pb2.ReportOutcomeRequest(
        request_id=report.request_id,
        attempt=report.attempt,
        worker_id=report.worker_id,
        outcome=outcome_name(report.outcome),
        output_tokens=report.output_tokens,
        cached_tokens=report.cached_tokens,
        ttft_ms=report.time_to_first_token_ms,
        tpot_ms=report.time_per_output_token_ms,
        generation_id=report.generation_id,
    )
