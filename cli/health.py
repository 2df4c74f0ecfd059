"""`deepmesh health`: whether a service takes requests, for probes."""

import asyncio
from typing import Annotated

import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.channel import Channels
from mesh.errors import EndpointUnavailable, MeshError

ANSWER_SECONDS = 3.0


def health(
    endpoint: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The gRPC of any service of the mesh.")],
    service: Annotated[str, typer.Option(help="readiness, or liveness: what gRPC's health service answers for.")] = (
        "readiness"
    ),
) -> None:
    """End with status 0 if the service at HOST:PORT is ready (or alive), else with one line and status 1."""
    asyncio.run(_check(Channels(), endpoint, service))


async def _check(channels: Channels, endpoint: str, service: str) -> None:
    async with channels.open(endpoint) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_SECONDS)
        except MeshError as error:
            raise EndpointUnavailable(f"no answer from {endpoint} about its {service}: {error.message}") from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise EndpointUnavailable(f"{endpoint} is not ready: its {service} is {status}")
