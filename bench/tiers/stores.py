"""KV stores in processes of their own, and the ways in which a rank's pool gets blocks from them."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepmesh.internal.v1 import kvstore_pb2_grpc

from bench.kv_store.worker import KvWorker, attached, offer_all, store_process, until_written
from kvstore.client import StoreClient
from mesh.rpc.channel import Channels
from transfer.config import TransferConfig
from transfer.memory import KvMemory

# Blocks that a store has room for besides those that it must keep.
SPARE_BLOCKS = 2
# A slot of a store's file has a header of a page or two.
SLOT_SPARE_BYTES = 8 << 10
# What a rank on a GPU adds to transports.
GPU_TRANSPORTS = "cuda_copy,"
FETCH_SECONDS = 60.0
POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Way:
    """A store as one transfer agent of the pool uses it."""

    name: str
    worker: KvWorker
    client: StoreClient
    stub: Any
    store_id: str
    # Whether the store is to read what it offers from its disk.
    from_disk: bool = False

    async def offer(self, chain: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Give the store a chain whose KV is in these blocks of the pool."""
        self.worker.hold(chain, blocks)
        await offer_all(self.worker, self.client, self.stub, chain)
        await asyncio.to_thread(self._until_pushed)

    def _until_pushed(self) -> None:
        while self.worker.agent.counters().open_pushes:
            time.sleep(POLL_SECONDS)

    def take_events(self) -> None:
        """Take the ends of pushes from the agent, so that an engine which uses it next gets events of its own alone."""
        self.worker.deliver(self.client)

    async def until_on_disk(self, blocks: int) -> None:
        if self.from_disk:
            await until_written(self.stub, blocks)


@asynccontextmanager
async def store_ways(
    kv_memory: Callable[[], KvMemory], blocks: int, longest: int, directory: Path
) -> AsyncIterator[list[Way]]:
    """kv_memory: makes one for each agent; blocks: what a store must hold; longest: blocks of the longest chain, all
    that the store with a disk holds in memory.
    """
    pool = kv_memory()
    block_bytes = pool.layers * pool.piece_bytes
    in_memory = {"memory_bytes": (blocks + SPARE_BLOCKS) * block_bytes}
    on_disk = {
        "memory_bytes": (longest + SPARE_BLOCKS) * block_bytes,
        "disk.path": directory,
        "disk.bytes": (blocks + SPARE_BLOCKS) * (block_bytes + SLOT_SPARE_BYTES),
        "disk.least_uses": 0,
    }
    tcp = (GPU_TRANSPORTS if pool.is_on_gpu else "") + "tcp"
    async with AsyncExitStack() as stack:
        near, far, disk = [
            await stack.enter_async_context(store_process(settings))
            for settings in (in_memory, in_memory | {"transfer.transports": "tcp"}, on_disk)
        ]
        ways = []
        secret = secrets.token_bytes(32)
        for name, endpoint, config, from_disk, own_secret in (
            ("store of this host, mapped", near, TransferConfig(map_stores=True), False, secret),
            ("the same, trusted", near, TransferConfig(map_stores=True), False, None),
            ("store of this host, UCX", near, TransferConfig(map_stores=False), False, secret),
            ("store, TCP", far, TransferConfig(map_stores=False, transports=tcp), False, secret),
            ("store's disk, mapped", disk, TransferConfig(map_stores=True), True, secret),
        ):
            config = config.model_copy(update={"fetch_seconds": FETCH_SECONDS})
            worker = KvWorker(
                pool.layers,
                pool.blocks,
                pool.piece_bytes,
                config,
                secret=own_secret,
                # Its own memory is never touched: the pool's takes its place.
                place=lambda _: kv_memory(),
            )
            stack.callback(worker.agent.close)
            client = await stack.enter_async_context(attached(worker, [endpoint]))
            channel = await stack.enter_async_context(Channels().open(endpoint))
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            ways.append(Way(name, worker, client, stub, client.attached[0], from_disk))
        yield ways
