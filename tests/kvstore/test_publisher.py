"""What a store tells its index, and that it tells all of it again where the index lost it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from kvstore.directory import BlockDirectory
from kvstore.index import Index, Location
from kvstore.memory_index import MemoryIndex
from kvstore.publisher import Publisher
from mesh.errors import IndexUnavailable
from mesh.ports import free_port
from tests.support.valkey import redis_client, redis_index, running_valkey
from tests.support.waiting import eventually

KEYS = [number.to_bytes(24, "big") for number in range(3000)]


class FailingIndex(MemoryIndex):
    """Fails as often as it is told to, at its next changes."""

    failures = 0

    async def add(self, keys: Sequence[bytes]) -> None:
        if self.failures:
            self.failures -= 1
            raise IndexUnavailable("told to fail")
        await super().add(keys)


@asynccontextmanager
async def publishing(index: Index, directory: BlockDirectory, lease_seconds: float = 3.0) -> AsyncIterator[Publisher]:
    publisher = Publisher(index, lambda: directory.held, lease_seconds)
    task = asyncio.create_task(publisher.run())
    yield publisher
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def store(directory: BlockDirectory, keys: Sequence[bytes]) -> None:
    reservation = directory.reserve(None, keys)
    assert reservation is not None
    directory.store(reservation.blocks)


async def until_matched(index: Index, blocks: int) -> None:
    async def matched() -> bool:
        location = await index.match(KEYS)
        return (location.blocks if location else 0) == blocks

    await eventually(matched)


async def test_what_is_stored_and_what_makes_room_is_told() -> None:
    directory, index = BlockDirectory(4), MemoryIndex("a", "1")
    async with publishing(index, directory) as publisher:
        store(directory, KEYS[:4])
        publisher.wake()
        await until_matched(index, 4)
        store(directory, [b"x" * 24])
        publisher.wake()
        await until_matched(index, 3)


async def test_changes_that_failed_to_publish_are_published_with_everything() -> None:
    directory, index = BlockDirectory(10), FailingIndex("a", "1")
    async with publishing(index, directory) as publisher:
        store(directory, KEYS[:2])
        publisher.wake()
        await until_matched(index, 2)
        index.failures = 1
        store(directory, KEYS[:6])
        publisher.wake()
        await until_matched(index, 6)


async def test_the_index_is_rebuilt_when_redis_comes_back_empty() -> None:
    directory, port = BlockDirectory(3000), free_port()
    store(directory, KEYS)
    async with redis_index(f"redis://127.0.0.1:{port}") as index, publishing(index, directory):
        await asyncio.sleep(0.2)
        assert await index.match(KEYS) is None
        for _ in range(2):
            with running_valkey(port) as server:
                await until_matched(index, 3000)
                async with redis_client(server) as client:
                    assert await client.scard("deepmesh:{kv}:a:1") == 3000
            assert await index.match(KEYS) is None


async def test_entries_that_redis_lost_are_told_again() -> None:
    directory = BlockDirectory(3000)
    store(directory, KEYS)
    with running_valkey() as server:
        async with redis_index(server.connection_url) as index, publishing(index, directory):
            await until_matched(index, 3000)
            async with redis_client(server) as client:
                await client.srem("deepmesh:{kv}:a:1", KEYS[10])
            await until_matched(index, 3000)
            assert await index.match(KEYS[10:]) == Location("a", "1", 2990)
            await eventually(lambda: directory.held.drain_changes().stored == [])
