"""The workers of a running mesh, as its scheduler knows them."""

from collections.abc import Sequence

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role

ANSWER_SECONDS = 10.0


async def workers_of(scheduler: str, channels: Channels) -> Sequence[scheduler_pb2.WorkerStatus]:
    """Raises MeshError if the scheduler does not answer."""
    async with channels.open(scheduler, Role.SCHEDULER) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchWorkers(
            scheduler_pb2.WatchWorkersRequest(), timeout=ANSWER_SECONDS
        )
        try:
            return list((await call.read()).workers)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
