"""A store and workers that really move bytes, in the test's process."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from deepmesh.internal.v1 import kvstore_pb2

from bench.kv_store.worker import KvWorker, attached, offer_all
from kvstore.__main__ import running_store, ucx_agents
from kvstore.client import StoreClient
from kvstore.config import KvStoreConfig
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from tests.support.stores import store_config, store_stub
from tests.support.waiting import eventually
from transfer.config import TransferConfig
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory, Pool

LAYERS, PIECE_BYTES, BLOCKS = 3, 1 << 12, 32
SMALL_SLOTS = TransferConfig(slot_bytes=1 << 16, slots=4, fetch_seconds=30.0)
CHAIN = chain_hashes(range(64 * 16))


def small_store(**changes: Any) -> KvStoreConfig:
    """Room for 16 blocks; a segment holds 5."""
    room = 16 * LAYERS * PIECE_BYTES
    return store_config(**{"memory_bytes": room, "transfer": SMALL_SLOTS.model_dump(), **changes})


@dataclass
class Attached:
    """A worker whose blocks 0 to 15 hold random bytes of CHAIN; what it fetches goes to 16 to 31."""

    endpoint: str
    worker: KvWorker
    client: StoreClient
    stub: Any

    async def offer(self, blocks: int) -> None:
        await offer_all(self.worker, self.client, self.stub, CHAIN[:blocks])

    def fetch(self, blocks: int, store_id: str = "s") -> int:
        """How many blocks of CHAIN came; asserts that they are those of a worker made with the same seed."""
        self.worker.memory[:, 16:] = 0
        fetched = self.worker.fetch(store_id, CHAIN[:blocks], range(16, 16 + blocks))
        count = fetched.blocks
        assert (self.worker.memory[:, 16 : 16 + count] == self.worker.memory[:, :count]).all()
        assert not self.worker.memory[:, 16 + count :].any()
        return count

    async def matched(self) -> kvstore_pb2.MatchPrefixResponse:
        namespace = worker_wire.namespace_message(self.worker.namespace)
        request = kvstore_pb2.MatchPrefixRequest(kv_namespace=namespace, block_hashes=CHAIN)
        response: kvstore_pb2.MatchPrefixResponse = await self.stub.MatchPrefix(request)
        return response

    async def status(self) -> kvstore_pb2.GetStatusResponse:
        response: kvstore_pb2.GetStatusResponse = await self.stub.GetStatus(kvstore_pb2.GetStatusRequest())
        return response

    async def until_quiet(self) -> None:
        """Nothing is open in the store, and nothing is held for anything."""

        async def quiet() -> bool:
            transfers = (await self.status()).transfers
            opened = transfers.open_landings + transfers.open_pushes
            return opened == 0 and transfers.free_slots == transfers.total_slots

        await eventually(quiet)


@asynccontextmanager
async def attached_worker(
    endpoint: str,
    weights: str = "f",
    dtype: str = "bytes",
    place: Callable[[Pool], KvMemory] = HostMemory,
    secret: bytes | None = None,
    **transfer: Any,
) -> AsyncIterator[Attached]:
    config = SMALL_SLOTS.model_copy(update=transfer)
    worker = KvWorker(LAYERS, BLOCKS, PIECE_BYTES, config, weights, secret, dtype=dtype, place=place)
    worker.memory[:, :16] = np.random.default_rng(0).integers(1, 256, (LAYERS, 16, PIECE_BYTES), np.uint8)
    worker.hold(CHAIN, range(16))
    try:
        async with attached(worker, [endpoint]) as client, store_stub(endpoint) as stub:
            yield Attached(endpoint, worker, client, stub)
    finally:
        worker.agent.close()


@asynccontextmanager
async def store_and_worker(**changes: Any) -> AsyncIterator[Attached]:
    settings = small_store(**changes)
    async with (
        running_store(settings, ucx_agents(settings.transfer)) as server,
        attached_worker(server.endpoint) as worker,
    ):
        yield worker
        await worker.until_quiet()
