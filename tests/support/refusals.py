"""Calls that a gRPC service refuses."""

from collections.abc import Awaitable

import grpc
import pytest

from mesh.errors import MeshError
from mesh.rpc.failures import from_rpc_error


async def refused(call: Awaitable[object]) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)
