"""Watches the scheduler's registry for prefill workers."""

import logging

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2

from decode_svc.registered import RegisteredPrefills
from mesh.backoff import Backoff
from mesh.errors import MeshError, SchedulerUnavailable
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role

log = logging.getLogger(__name__)


class RegistryLink:
    def __init__(self, endpoint: str, channels: Channels, registered: RegisteredPrefills) -> None:
        self._endpoint = endpoint
        self._channels = channels
        self._registered = registered
        self._backoff = Backoff(log)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with self._channels.open(self._endpoint, Role.SCHEDULER) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                try:
                    await self._watch(stub)
                except MeshError as error:
                    await self._backoff.failed(f"no registry from the scheduler at {self._endpoint}", error)

    async def _watch(self, stub: scheduler_pb2_grpc.SchedulerServiceStub) -> None:
        """Raises MeshError if the stream breaks."""
        call = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        try:
            # gRPC returns None for a message that it cannot parse.
            while isinstance(response := await call.read(), scheduler_pb2.WatchWorkersResponse):
                self._backoff.succeeded()
                self._registered.replace(
                    _prefill_endpoints(response), response.lease.ToMilliseconds() / 1000, self._endpoint
                )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        raise SchedulerUnavailable("the scheduler ended the stream, or sent a malformed message")


def _prefill_endpoints(response: scheduler_pb2.WatchWorkersResponse) -> dict[str, str]:
    identities = (worker.identity for worker in response.workers)
    return {each.worker_id: each.endpoint for each in identities if each.role == workers_pb2.WORKER_ROLE_PREFILL}
