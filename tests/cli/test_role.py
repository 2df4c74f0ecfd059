from collections.abc import AsyncIterator
from typing import Any

import pytest
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2

from cli.role import change_role
from mesh.config import ServerConfig
from mesh.domain.workers import WorkerRole
from mesh.errors import InvalidRequest
from mesh.rpc.channel import Channels
from mesh.rpc.server import MeshServer, Registration


class Workers(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler that knows these workers, by their id."""

    def __init__(self, workers: dict[str, tuple[str, workers_pb2.WorkerState]]) -> None:
        """workers: the model and state of each."""
        self._workers = workers

    async def WatchWorkers(self, request: Any, context: Any) -> AsyncIterator[scheduler_pb2.WatchWorkersResponse]:
        role = workers_pb2.WORKER_ROLE_DECODE
        statuses = [
            scheduler_pb2.WorkerStatus(
                identity=workers_pb2.WorkerIdentity(worker_id=worker, model=model, role=role), state=state
            )
            for worker, (model, state) in self._workers.items()
        ]
        yield scheduler_pb2.WatchWorkersResponse(workers=statuses)


async def test_the_last_decode_worker_of_a_model_keeps_its_role() -> None:
    serving, draining = workers_pb2.WORKER_STATE_SERVING, workers_pb2.WORKER_STATE_DRAINING
    workers = Workers({"decode-0": ("a", serving), "decode-1": ("a", draining), "decode-2": ("b", serving)})
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    registration = Registration(add, workers, "deepmesh.internal.v1.SchedulerService", ("WatchWorkers",))
    async with MeshServer(ServerConfig(), "scheduler", [registration]) as server:
        with pytest.raises(InvalidRequest, match="decode-0 is the last decode worker of a: "):
            await change_role(Channels(), server.endpoint, "decode-0", WorkerRole.PREFILL)
