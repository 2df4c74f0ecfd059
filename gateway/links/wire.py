"""Translates between the gateway's types and the protos of the scheduler and the decode workers."""

from deepmesh.internal.v1 import decode_pb2, scheduler_pb2, workers_pb2

from gateway.generation import Generation
from gateway.links.workers import Worker
from mesh.domain import wire, worker_wire
from mesh.domain.placement import Placement
from mesh.domain.requests import Submission

LARGEST_DEADLINE_MS = 2**32 - 1


def submission(
    stream_id: int, attempt: int, placement: Placement, generation: Generation, now: float
) -> decode_pb2.AttachRequest:
    """The request as its worker gets it: the prompt and the tokens so far, and what remains to generate."""
    submission = Submission(
        stream_id=stream_id,
        request=generation.continuation(attempt),
        deadline_ms=min(max(int(1000 * (generation.deadline - now)), 1), LARGEST_DEADLINE_MS),
        prefill=placement.prefill,
        store=placement.store,
        stream=generation.prepared.stream,
        rank=placement.decode_rank,
        prefill_rank=placement.prefill_rank,
    )
    return decode_pb2.AttachRequest(submission=wire.submission_message(submission))


def workers(response: scheduler_pb2.WatchWorkersResponse) -> list[Worker]:
    """The workers whose role this version of the gateway knows."""
    return [_worker(status) for status in response.workers if status.identity.role in worker_wire.ROLES]


def _worker(status: scheduler_pb2.WorkerStatus) -> Worker:
    identity = worker_wire.reported_identity(status.identity)
    return Worker(
        target=identity.target,
        role=identity.role,
        model=identity.model,
        kv_namespace=identity.kv_namespace,
        can_prefill=identity.can_prefill,
        serving=status.state == workers_pb2.WORKER_STATE_SERVING,
        context_tokens=identity.context_tokens,
        vocabulary_size=identity.vocabulary_size,
        max_requests=identity.max_requests,
        requests=status.load.running_requests + status.load.waiting_requests,
        sparse_prefill=identity.sparse_prefill,
    )
