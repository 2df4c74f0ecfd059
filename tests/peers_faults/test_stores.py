"""One store of KV for everybody: what other servers' users have read from theirs."""

import asyncio

import psutil
import pytest

from bench.kv_store.worker import store_process
from mesh.blocks import chain_hashes
from tests.support.forking import forked_services
from tests.support.moving_store import CHAIN, attached_worker, store_and_worker


@pytest.mark.parametrize(("weights", "dtype"), [("other", "bytes"), ("f", "fp8")], ids=["weights", "kv dtype"])
async def test_one_stores_namespaces_share_no_block(weights: str, dtype: str) -> None:
    """https://github.com/InternLM/lmdeploy/issues/4930: keys of Mooncake's store left out KV's dtype and the weights.

    https://github.com/sgl-project/sglang/pull/38362: servers with other --kv-cache-dtype reused each other's bytes.
    """
    async with store_and_worker() as worker:
        await worker.offer(4)
        async with attached_worker(worker.endpoint, weights, dtype) as another:
            assert another.fetch(4) == 0
        assert worker.fetch(4) == 4


async def test_one_stores_tenants_share_no_block() -> None:
    """https://github.com/InternLM/lmdeploy/issues/4930: the same store had no isolation of tenants by default."""
    others = chain_hashes(range(64 * 4), cache_salt=b"another tenant")
    async with store_and_worker() as worker:
        await worker.offer(4)
        assert not set(others) & set(CHAIN)
        assert worker.worker.fetch("s", others, range(16, 20)).blocks == 0


async def test_a_get_slower_than_its_deadline_writes_nothing_late() -> None:
    """https://github.com/kvcache-ai/Mooncake/issues/850: a get that outlives its lease read what had been overwritten.

    https://github.com/kvcache-ai/Mooncake/issues/4239: of 2026, the same by another path.
    """
    settings = {"store_id": "s", "memory_bytes": 1 << 20, "transfer.slot_bytes": 1 << 16, "transfer.slots": 4}
    with forked_services():
        async with store_process(settings) as endpoint, attached_worker(endpoint, fetch_seconds=0.5) as worker:
            await worker.offer(8)
            (store,) = (each for each in psutil.Process().children(recursive=True) if listens(each, endpoint))
            store.suspend()
            try:
                late = await asyncio.to_thread(worker.worker.fetch, "s", CHAIN[:8], range(16, 24))
            finally:
                store.resume()
            assert late.blocks == 0
            # The blocks belong to somebody else now, and the store sends what it was asked for.
            worker.worker.memory[:, 16:] = 255
            await asyncio.sleep(0.5)
            assert (worker.worker.memory[:, 16:] == 255).all()
            assert await asyncio.to_thread(worker.fetch, 8) == 8


def listens(process: psutil.Process, endpoint: str) -> bool:
    port = int(endpoint.rpartition(":")[2])
    return any(each.laddr and each.laddr.port == port for each in process.net_connections() if each.status == "LISTEN")
