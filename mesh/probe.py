"""Asks a service for its health. `python -m mesh.probe HOST:PORT` is for containers' health checks.

Health checks run again and again, so this module imports little: it needs a fifth of the processor time of `deepmesh
health` (0.17 s instead of 0.87 s).
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.errors import EndpointUnavailable

LIVENESS = "liveness"
READINESS = "readiness"

# The environment's web proxy is never between services of the mesh.
_OPTIONS = (("grpc.enable_http_proxy", 0),)


def probe(endpoint: str, service: str, seconds: float) -> None:
    """Return if `service` (LIVENESS or READINESS) at host:port is well. Raises EndpointUnavailable if it is not."""
    with grpc.insecure_channel(endpoint, _OPTIONS) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        except grpc.RpcError as error:
            why = error.details() or error.code().name
            raise EndpointUnavailable(f"no answer from {endpoint} about its {service}: {why}") from error
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        raise EndpointUnavailable(f"{endpoint} is not ready: its {service} is {status}")


if __name__ == "__main__":
    try:
        # The runtime that runs the health check has its own, shorter timeout.
        probe(sys.argv[1], READINESS, seconds=60.0)
    except EndpointUnavailable as error:
        sys.exit(error.message)
