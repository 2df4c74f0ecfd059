"""A gateway that gives fixed answers, over real gRPC."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from mesh.config import ServerConfig
from mesh.rpc.server import MeshServer, Registration

Delta = gateway_pb2.GenerateDelta


class ScriptedGateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Streams `deltas` in answer to every request, then awaits `before_end`, then finishes. Keeps its requests."""

    def __init__(self, deltas: Sequence[Delta], before_end: Callable[[], Awaitable[None]] | None = None) -> None:
        self.requests: list[gateway_pb2.GenerateRequest] = []
        self._deltas = deltas
        self._before_end = before_end

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        self.requests.append(request)
        yield gateway_pb2.GenerateResponse(started=gateway_pb2.GenerateStarted(model="scripted"))
        for delta in self._deltas:
            yield gateway_pb2.GenerateResponse(delta=delta)
        if self._before_end is not None:
            await self._before_end()
        usage = common_pb2.Usage(prompt_tokens=100, cached_tokens=64, completion_tokens=len(self._deltas))
        yield gateway_pb2.GenerateResponse(finished=gateway_pb2.GenerateFinished(usage=usage))

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=[gateway_pb2.Model(name="scripted")])

    def served(self) -> MeshServer:
        add = gateway_pb2_grpc.add_GatewayServiceServicer_to_server
        registration = Registration(add, self, "deepmesh.v1.GatewayService")
        return MeshServer(ServerConfig(drain_seconds=0.1), "gateway", [registration])
