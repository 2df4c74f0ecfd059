"""A store with little memory and a disk, real bytes, and a worker that checks who computed its blocks."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deepmesh.internal.v1 import kvstore_pb2

from bench.kv_store.worker import KvWorker, attached, offer_all
from kvstore.__main__ import running_store, ucx_agents
from kvstore.disk.block_file import BlockFile
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from mesh.domain.shares import tenant_tag
from tests.support.stores import store_config, store_stub
from tests.support.waiting import eventually
from transfer.config import TransferConfig

LAYERS, PIECE_BYTES = 3, 1 << 12
# In the worker, and half of them in the store's memory.
BLOCKS = 32
MEMORY_BLOCKS = 16
TRANSFER = TransferConfig(slot_bytes=1 << 16, slots=4, fetch_seconds=30.0)
FIRST, SECOND, THIRD = (chain_hashes(range(64 * 8), bytes([number])) for number in range(3))
# Their places in the worker's memory; what it fetches comes after them.
PLACES = {chain[0]: range(8 * number, 8 * number + 8) for number, chain in enumerate((FIRST, SECOND, THIRD))}
TARGET = range(24, 32)


@dataclass
class Scene:
    worker: KvWorker
    client: Any
    stub: Any

    async def offer(self, chain: Sequence[bytes], tenant: bytes = b"") -> None:
        self.worker.hold(chain, PLACES[chain[0]])
        await offer_all(self.worker, self.client, self.stub, chain, tenant)

    async def fetch(self, chain: Sequence[bytes]) -> int:
        """How many blocks came; asserts that they are right."""
        self.worker.memory[:, TARGET] = 0
        fetched = await asyncio.to_thread(self.worker.fetch, "s", chain, TARGET[: len(chain)])
        count = fetched.blocks
        assert (self.worker.memory[:, TARGET[:count]] == self.worker.memory[:, PLACES[chain[0]][:count]]).all()
        assert fetched.seconds < TRANSFER.fetch_seconds
        return count

    async def tier(self, name: str) -> kvstore_pb2.TierStatus | None:
        status = await self.stub.GetStatus(kvstore_pb2.GetStatusRequest())
        return next((tier for tier in status.tiers if tier.name == name), None)

    async def until_on_disk(self, blocks: int) -> None:

        async def on_disk() -> bool:
            tier = await self.tier("disk")
            return tier is not None and tier.used_blocks == blocks

        await eventually(on_disk)

    async def until_known(self, chain: Sequence[bytes]) -> None:
        """Until the index says that the store has all of it."""
        namespace = worker_wire.namespace_message(self.worker.namespace)
        request = kvstore_pb2.MatchPrefixRequest(kv_namespace=namespace, block_hashes=chain)

        async def known() -> bool:
            return bool((await self.stub.MatchPrefix(request)).blocks == len(chain))

        await eventually(known)


@asynccontextmanager
async def scene(directory: Path, blocks: int = 64, least_uses: int = 0, **settings: Any) -> AsyncIterator[Scene]:
    # A slot has a page more than its block.
    disk = {"path": directory, "bytes": max(1 << 20, 4096 + blocks * 4 * 4096), "least_uses": least_uses}
    room = MEMORY_BLOCKS * LAYERS * PIECE_BYTES
    config = store_config(memory_bytes=max(room, 1 << 16), transfer=TRANSFER.model_dump(), disk=disk, **settings)
    worker = KvWorker(LAYERS, BLOCKS, PIECE_BYTES, TRANSFER, "f", secret=b"of all workers")
    worker.memory[:, :24] = np.random.default_rng(0).integers(1, 256, (LAYERS, 24, PIECE_BYTES), np.uint8)
    try:
        async with (
            running_store(config, ucx_agents(config.transfer)) as server,
            attached(worker, [server.endpoint]) as client,
            store_stub(server.endpoint) as stub,
        ):
            yield Scene(worker, client, stub)
    finally:
        worker.agent.close()


async def test_blocks_that_left_memory_are_fetched_from_the_disk(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        for number, chain in enumerate((FIRST, SECOND, THIRD), 1):
            await it.offer(chain)
            await it.until_on_disk(8 * number)
        for _ in range(2):
            for chain in (FIRST, SECOND, THIRD):
                assert await it.fetch(chain) == 8
        await it.until_known(FIRST)


async def test_a_restarted_store_has_what_was_on_its_disk(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        await it.offer(FIRST)
        await it.offer(SECOND)
        await it.until_on_disk(16)
    async with scene(tmp_path) as it:
        await it.until_on_disk(16)
        assert await it.fetch(SECOND) == 8
        assert await it.fetch(FIRST[:3]) == 3
        await it.until_known(FIRST)


async def test_a_tenants_disk_quota_holds_after_a_restart_too(tmp_path: Path) -> None:
    block_bytes = LAYERS * PIECE_BYTES
    quota = {"disk_bytes": 10 * block_bytes}
    async with scene(tmp_path, quota=quota) as it:
        await it.offer(FIRST, tenant_tag("quiet"))
        await it.until_on_disk(8)
        await it.offer(SECOND, tenant_tag("busy"))
        await it.until_on_disk(16)
        await it.offer(THIRD, tenant_tag("busy"))
        await it.until_on_disk(18)
        # It was read from the disk, in whose place others are in memory; so it is whose it was.
        assert await it.fetch(FIRST) == 8
        await it.until_known(THIRD)
    async with scene(tmp_path, quota={"memory_bytes": 4 * block_bytes, **quota}) as it:
        await it.until_on_disk(18)
        # Its tenant's blocks in memory are as few as its quota allows.
        assert await it.fetch(FIRST) == 4
        # This chain gave way to the other from its end.
        assert await it.fetch(SECOND) == 2


async def test_what_comes_while_the_file_is_opened_is_written_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = threading.Event()
    allocate = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: opens.wait(30.0) and allocate(*given))
    async with scene(tmp_path) as it:
        try:
            await it.offer(FIRST)
            await it.offer(SECOND)
        finally:
            opens.set()
        await it.until_on_disk(16)


async def test_only_what_was_used_again_is_written(tmp_path: Path) -> None:
    async with scene(tmp_path, least_uses=1) as it:
        await it.offer(FIRST)
        assert await it.fetch(FIRST[:3]) == 3
        await it.until_on_disk(3)
        await it.offer(SECOND)
        await it.offer(THIRD)
        await it.until_on_disk(3)
        assert await it.fetch(FIRST) == 3


def flip_bit(file: Path, content: bytes) -> None:
    """Somewhere in this content."""
    place = file.read_bytes().index(content) + 100
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(bytes([content[100] ^ 1]))


async def test_a_damaged_block_ends_the_answer_and_is_removed(tmp_path: Path) -> None:
    async with scene(tmp_path) as it:
        await it.offer(FIRST)
        await it.until_on_disk(8)
    flip_bit(tmp_path / "s.kv", it.worker.memory[1, 2].tobytes())
    async with scene(tmp_path) as it:
        await it.until_on_disk(8)
        assert await it.fetch(FIRST) <= 2
        await it.until_on_disk(7)
        assert await it.fetch(FIRST) == 2
        # It is computed and offered again.
        await it.offer(FIRST)
        assert await it.fetch(FIRST) == 8


async def test_a_disk_that_fails_costs_what_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(tmp_path) as it:
        await it.offer(FIRST)
        await it.until_on_disk(8)

        def fail(*_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(BlockFile, "read", fail)
        monkeypatch.setattr(BlockFile, "write", fail)
        await it.offer(SECOND)
        assert await it.fetch(SECOND) == 8
        await it.offer(THIRD)
        assert await it.fetch(FIRST) == 0


@pytest.mark.parametrize("failure", [errno.ENOSPC, errno.EACCES])
async def test_a_disk_that_has_no_room_leaves_memory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    async with scene(tmp_path) as it:
        await it.offer(FIRST)
        assert await it.fetch(FIRST) == 8
        tier = await it.tier("disk")
        assert tier is not None and tier.total_blocks == 0
