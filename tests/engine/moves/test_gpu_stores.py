"""A worker with its KV on a GPU, and a store whose UCX knows no GPU, as on a host that has none."""

import asyncio

import pytest
import torch
from deepmesh.internal.v1 import kvstore_pb2_grpc

from bench.kv_store.worker import KvWorker, attached, offer_all, store_process
from mesh.blocks import chain_hashes
from mesh.rpc.channel import Channels
from transfer.config import TransferConfig
from transfer.memory import KvMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAYERS, BLOCKS, PIECE_BYTES = 3, 8, 64 * 576 * 2
# Two blocks, so that there are several segments.
SLOT_BYTES = 1 << 19
CHAIN = chain_hashes(range(64 * 4))


@pytest.mark.parametrize("secret", [None, b"of all workers"], ids=["trusted", "checked"])
@pytest.mark.parametrize("transports", ["tcp", "posix,self"])
async def test_a_store_without_cuda_keeps_and_returns_blocks(transports: str, secret: bytes | None) -> None:
    from engine.runner.device_memory import DeviceMemory

    pool = torch.randint(256, (LAYERS, BLOCKS, 64, PIECE_BYTES // 64), dtype=torch.uint8, device="cuda")
    before = pool[:, :4].clone()

    def place(_: object) -> KvMemory:
        return DeviceMemory(pool)

    config = TransferConfig(
        slot_bytes=SLOT_BYTES, transports=f"cuda_copy,{transports}", map_stores=False, fetch_seconds=30.0
    )
    worker = KvWorker(LAYERS, BLOCKS, PIECE_BYTES, config, secret=secret, place=place)
    worker.hold(CHAIN, range(4))
    settings = {
        "memory_bytes": 1 << 24,
        "transfer.transports": f"'{transports}'",
        "transfer.slot_bytes": SLOT_BYTES,
    }
    try:
        async with (
            store_process(settings) as endpoint,
            attached(worker, [endpoint]) as client,
            Channels().open(endpoint) as channel,
        ):
            await offer_all(worker, client, kvstore_pb2_grpc.KvStoreServiceStub(channel), CHAIN)
            fetched = await asyncio.to_thread(worker.fetch, client.attached[0], CHAIN, [6, 4, 7, 5])
    finally:
        worker.agent.close()
    assert fetched.blocks == 4 and torch.equal(pool[:, [6, 4, 7, 5]], before)
