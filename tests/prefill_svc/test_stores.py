"""Workers with a real KV store: what one computed, another fetches."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from deepmesh.internal.v1 import kvstore_pb2, share_pb2, targets_pb2

from decode_svc.worker import DecodeWorker
from kvstore.__main__ import running_store, ucx_agents
from mesh.blocks import chain_hashes
from mesh.domain.worker_wire import namespace_message
from mesh.ports import free_port
from prefill_svc.worker import PrefillWorker
from tests.support.decode_server import gateway_client, running_worker
from tests.support.prefilling import ORACLE_READY, running_prefill
from tests.support.stores import store_config, store_stub
from tests.support.waiting import eventually
from transfer.config import TransferConfig

PROMPT = [number % 1000 for number in range(1000)]
STORE = targets_pb2.StoreTarget(store_id="s", blocks=15)


@asynccontextmanager
async def store(port: int = 0, **changes: Any) -> AsyncIterator[str]:
    config = store_config(memory_bytes=1 << 20, server={"port": port, "drain_seconds": 0.2}, **changes)
    async with running_store(config, ucx_agents(TransferConfig())) as server:
        yield server.endpoint


async def until_stored(endpoint: str, token_ids: list[int]) -> None:
    """Wait until every full block of the tokens is visible."""
    hashes = chain_hashes(token_ids)
    namespace = namespace_message(ORACLE_READY.namespace)
    request = kvstore_pb2.MatchPrefixRequest(kv_namespace=namespace, block_hashes=hashes)
    async with store_stub(endpoint) as stub:

        async def stored() -> bool:
            return bool((await stub.MatchPrefix(request, wait_for_ready=True)).blocks == len(hashes))

        await eventually(stored)


async def until_attached(*workers: PrefillWorker | DecodeWorker) -> None:
    await eventually(lambda: all(stores.attached for worker in workers for stores in worker.host.stores))


def decode(endpoint: str, **changes: Any) -> Any:
    return running_worker(engine={"transfer": {}}, stores=[endpoint], **changes)


async def test_what_one_prefill_worker_computed_another_fetches() -> None:
    async with (
        store() as endpoint,
        running_prefill(stores=[endpoint]) as first,
        running_prefill(stores=[endpoint], worker_id="p2") as second,
        running_worker(engine={"transfer": {}}) as one,
        running_worker(engine={"transfer": {}}) as other,
        gateway_client(one.endpoint) as gateway_one,
        gateway_client(other.endpoint) as gateway_other,
    ):
        await until_attached(first.worker, second.worker)
        computed = await gateway_one.ended(await gateway_one.submit(PROMPT, 5, prefill=first.target))
        assert (computed.cached_tokens, computed.is_exact()) == (0, True)
        await until_stored(endpoint, PROMPT)
        stream_id = await gateway_other.submit([*PROMPT, 7, 8], 5, prefill=second.target, store=STORE)
        fetched = await gateway_other.ended(stream_id)
        assert (fetched.cached_tokens, fetched.is_exact()) == (960, True)
        assert second.worker.host.report.transfers.fetched_blocks == 15


async def test_a_decode_worker_offers_and_fetches_blocks() -> None:
    async with (
        store() as endpoint,
        decode(endpoint) as one,
        decode(endpoint, worker_id="d2") as other,
        gateway_client(one.endpoint) as gateway_one,
        gateway_client(other.endpoint) as gateway_other,
    ):
        await until_attached(one.worker, other.worker)
        generated = await gateway_one.ended(await gateway_one.submit(PROMPT[:64], 200))
        conversation = [*PROMPT[:64], *generated.tokens]
        await until_stored(endpoint, conversation[:256])
        target = targets_pb2.StoreTarget(store_id="s", blocks=4)
        fetched = await gateway_other.ended(await gateway_other.submit(conversation, 5, store=target))
        assert (fetched.cached_tokens, fetched.is_exact()) == (256, True)


async def test_each_rank_of_a_worker_offers_and_fetches() -> None:
    prompts = [[seed, *PROMPT[:700]] for seed in range(4)]
    async with (
        store() as endpoint,
        decode(endpoint, ranks=2) as one,
        decode(endpoint, ranks=2, worker_id="d2") as other,
        gateway_client(one.endpoint) as gateway_one,
        gateway_client(other.endpoint) as gateway_other,
    ):
        await until_attached(one.worker, other.worker)
        for stream_id in [await gateway_one.submit(prompt, 5) for prompt in prompts]:
            await gateway_one.ended(stream_id)
        for prompt in prompts:
            await until_stored(endpoint, prompt)
        target = targets_pb2.StoreTarget(store_id="s", blocks=10)
        streams = [await gateway_other.submit(prompt, 5, store=target) for prompt in prompts]
        for stream_id in streams:
            fetched = await gateway_other.ended(stream_id)
            assert (fetched.cached_tokens, fetched.is_exact()) == (640, True)
        assert all(view.transfers.fetched_blocks for view in other.worker.host.ranks.views)


async def test_a_tenants_blocks_keep_to_its_quota() -> None:
    block_bytes = ORACLE_READY.block_bytes
    async with (
        store(tenants=[{"name": "busy", "memory_bytes": 10 * block_bytes}]) as endpoint,
        decode(endpoint) as running,
        gateway_client(running.endpoint) as gateway,
        store_stub(endpoint) as stub,
    ):
        await until_attached(running.worker)

        async def run(tenant: str, prompt: list[int]) -> None:
            share = share_pb2.Share(tenant=tenant, weight=1)
            ended = await gateway.ended(await gateway.submit(prompt, 5, share=share))
            assert ended.is_exact()
            await until_stored(endpoint, prompt)

        await run("quiet", PROMPT[:256])
        for seed in range(3):
            await run("busy", [seed, *PROMPT[:400]])
        await until_stored(endpoint, PROMPT[:256])
        (memory,) = (await stub.GetStatus(kvstore_pb2.GetStatusRequest())).tiers
        assert memory.used_blocks == 4 + 10


async def test_a_store_that_returns_is_filled_again() -> None:
    port = free_port()
    async with decode(f"127.0.0.1:{port}") as running, gateway_client(running.endpoint) as gateway:
        async with store(port):
            await until_attached(running.worker)
            await gateway.ended(await gateway.submit(PROMPT, 5))
            await until_stored(f"127.0.0.1:{port}", PROMPT)
        alone = await gateway.ended(await gateway.submit([9, *PROMPT], 5, store=STORE))
        assert (alone.cached_tokens, alone.is_exact()) == (0, True)
        async with store(port):
            await until_attached(running.worker)
            await gateway.ended(await gateway.submit([*PROMPT, *PROMPT], 5))
            await until_stored(f"127.0.0.1:{port}", [*PROMPT, *PROMPT])
