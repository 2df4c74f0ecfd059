"""Translates between the gateway's types and the protos of the scheduler and the decode workers."""

from deepmesh.internal.v1 import decode_pb2, scheduler_pb2, workers_pb2

from gateway.generation import Generation
from gateway.workers import Worker
from mesh.domain import wire
from mesh.domain.placement import Placement
from mesh.domain.requests import Submission
from mesh.domain.targets import WorkerTarget
from mesh.domain.worker_wire import reported_namespace
from mesh.domain.workers import WorkerRole

LARGEST_DEADLINE_MS = 2**32 - 1

_ROLES: dict[int, WorkerRole] = {
    workers_pb2.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    workers_pb2.WORKER_ROLE_DECODE: WorkerRole.DECODE,
}


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
    return [
        _worker(status, _ROLES[status.identity.role]) for status in response.workers if status.identity.role in _ROLES
    ]


def _worker(status: scheduler_pb2.WorkerStatus, role: WorkerRole) -> Worker:
    identity = status.identity
    namespace = reported_namespace(identity.kv_namespace)
    return Worker(
        target=WorkerTarget(
            identity.worker_id,
            identity.incarnation,
            identity.endpoint,
            identity.slot_bytes or None,
            namespace.draft_layers,
        ),
        role=role,
        model=identity.model,
        kv_namespace=namespace,
        can_prefill=identity.can_prefill,
        serving=status.state == workers_pb2.WORKER_STATE_SERVING,
        context_tokens=identity.context_tokens,
        vocabulary_size=identity.vocabulary_size or None,
        max_requests=identity.max_requests,
        requests=status.load.running_requests + status.load.waiting_requests,
        sparse_prefill=wire.sparse_prefill(identity.sparse_prefill) if identity.HasField("sparse_prefill") else None,
    )
