"""What happens at the edge of every call to another service: request ids and spans go along, errors are translated."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from mesh.observe.spans import request_id
from mesh.observe.tracing import TRACEPARENT_KEY, current_traceparent
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.interceptors import REQUEST_ID_KEY


class CallInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """For unary calls: passes on the request id and the span, and turns gRPC's errors into MeshError.

    Streams do not use it, because gRPC would put a generator between every message and its reader. Streams pass
    `metadata=request_metadata()` instead, and translate their errors with `mesh.rpc.failures.from_rpc_error`.
    """

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Awaitable[grpc.aio.UnaryUnaryCall[Any, Any]]],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> grpc.aio.UnaryUnaryCall[Any, Any]:
        call = await continuation(_with_request(client_call_details), request)
        try:
            await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return call


def request_metadata() -> tuple[tuple[str, str], ...]:
    """The current request id and span as metadata of an outgoing call; empty outside requests."""
    named = ((REQUEST_ID_KEY, request_id.get()), (TRACEPARENT_KEY, current_traceparent()))
    return tuple((key, value) for key, value in named if value is not None)


def _with_request(details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for key, value in request_metadata():
        if metadata.get(key) is None:
            metadata.add(key, value)
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )
