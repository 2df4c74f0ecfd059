"""Configurations and calls of KV stores for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from deepmesh.internal.v1 import kvstore_pb2_grpc

from kvstore.config import KvStoreConfig
from mesh.rpc.channel import Channels


def store_config(**changes: Any) -> KvStoreConfig:
    """A store with room for 16 blocks of `tests.support.store_agent.worker_identity`."""
    values: dict[str, Any] = {"server": {"drain_seconds": 0.2}, "memory_bytes": 1 << 16, "store_id": "s", **changes}
    return KvStoreConfig.model_validate(values)


@asynccontextmanager
async def store_stub(endpoint: str) -> AsyncIterator[Any]:
    async with Channels().open(endpoint) as channel:
        yield kvstore_pb2_grpc.KvStoreServiceStub(channel)
