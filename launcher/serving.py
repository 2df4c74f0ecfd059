"""Waits until a mesh takes requests: the gateway learns of the workers only after every process is ready."""

import asyncio

from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc

from mesh.errors import NoWorker
from mesh.rpc.channel import Channels

_POLL_SECONDS = 0.05


async def until_served(
    gateway: str, workers: int, channels: Channels, timeout_seconds: float = 30.0, api_key: str | None = None
) -> list[gateway_pb2.Model]:
    """The models that the gateway at `gateway` lists, once `workers` workers serve them. Raises NoWorker, or the
    gateway's errors.
    """
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    async with channels.open(gateway) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            async with asyncio.timeout(timeout_seconds):
                while True:
                    response = await stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=10, metadata=metadata)
                    if sum(model.workers for model in response.models) >= workers:
                        return list(response.models)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise NoWorker(f"the gateway does not see {workers} workers after {timeout_seconds:g} s") from error
