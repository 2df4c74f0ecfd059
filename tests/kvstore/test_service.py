"""The store over gRPC, with agents that move no bytes."""

from typing import Any

import pytest

from mesh.blocks import chain_hashes
from mesh.domain.shares import tenant_tag
from mesh.errors import InvalidRequest, NamespaceMismatch, UnknownSession
from mesh.observe.metrics import KVSTORE_QUOTA_EVICTED_BLOCKS, KVSTORE_TENANT_BLOCKS
from tests.support.metric_values import value_of
from tests.support.store_agent import worker_identity
from tests.support.store_client import CHAIN, Client, refusals, store_client, unused_store
from tests.support.stores import store_config
from tests.support.valkey import running_valkey
from tests.support.waiting import eventually


async def test_figures_name_a_tenant_or_give_its_tag() -> None:
    quotas = {"quota": {"memory_bytes": 4 << 12}, "tenants": [{"name": "acme"}]}
    acme, other = tenant_tag("acme"), tenant_tag("other")

    def told(metric: Any, tenant: str) -> float:
        return value_of(metric.labels(tenant, "memory"))

    evicted = told(KVSTORE_QUOTA_EVICTED_BLOCKS, other.hex())
    async with store_client(store_config(**quotas)) as client:
        assert await client.store(CHAIN[:6], tenant=acme) == 6
        for seed in range(2):
            assert await client.store(chain_hashes(range(64 * 3), bytes([seed])), tenant=other) == 3
        await eventually(lambda: told(KVSTORE_TENANT_BLOCKS, "acme") == 6)
        await eventually(lambda: told(KVSTORE_TENANT_BLOCKS, other.hex()) == 4)
        await eventually(lambda: told(KVSTORE_QUOTA_EVICTED_BLOCKS, other.hex()) == evicted + 2)


async def test_a_renewed_session_stays_the_same() -> None:
    async with store_client() as client:
        first = client.session
        assert await client.attach() == first
        assert first.store_id == "s" and len(first.session_key) == 32
        assert first.lease.ToMilliseconds() == 10_000
        assert client.agent.sessions == {first.session_id: first.session_key}


async def test_an_expired_session_is_closed_for_its_agent() -> None:
    async with store_client(store_config(session_seconds=0.2)) as client:
        await eventually(lambda: client.agent.sessions == {})
        with pytest.raises(UnknownSession):
            await client.offer(CHAIN)


async def test_blocks_of_another_size_are_refused_other_namespaces_are_not() -> None:
    async with store_client() as client:
        for other in (worker_identity("x", block_bytes=8192), worker_identity("x", layers=4)):
            with pytest.raises(NamespaceMismatch, match="a store of its own"):
                await client.joined_by(other)
        joined = await client.joined_by(worker_identity("b", weights="other"))
        assert await client.store(CHAIN[:3]) == 3
        await client.until_matched(CHAIN, 3)
        assert (await joined.match(CHAIN)).blocks == 0
        assert await joined.store(CHAIN[:2]) == 2
        await joined.until_matched(CHAIN, 2)
        assert (await client.match(CHAIN)).blocks == 3
        assert len(client.agents.opened) == 1


async def test_a_worker_whose_slots_are_below_one_layer_is_refused() -> None:
    async with store_client() as client:
        await client.joined_by(worker_identity("a", slot_bytes=2048))
        with pytest.raises(InvalidRequest, match="slots of 2047 bytes"):
            await client.joined_by(worker_identity("b", slot_bytes=2047))


async def test_memory_that_cannot_be_had_is_refused_with_advice() -> None:
    async with unused_store(store_config(memory_bytes=1 << 50)) as client:
        with pytest.raises(NamespaceMismatch, match="lower memory_bytes"):
            await client.joined_by(worker_identity(block_bytes=1 << 40))


@pytest.mark.parametrize("block_bytes", [0, 4097, 1 << 20])
async def test_a_first_worker_whose_blocks_cannot_be_kept_is_refused(block_bytes: int) -> None:
    async with unused_store() as client:
        with pytest.raises((InvalidRequest, NamespaceMismatch)):
            await client.joined_by(worker_identity(block_bytes=block_bytes))
        await client.attach()


async def test_bad_input_is_refused_and_counted() -> None:
    async with store_client() as client:
        before = refusals(InvalidRequest)
        bad_calls = [
            client.offer([b"short"]),
            client.offer([bytes(16)] * 20_000),
            client.offer(CHAIN, parent=b"short"),
            client.offer(CHAIN, tenant=b"a name"),
            client.match([bytes(17)]),
        ]
        for call in bad_calls:
            with pytest.raises(InvalidRequest):
                await call
        assert refusals(InvalidRequest) == before + len(bad_calls)


async def test_an_unknown_session_is_refused_and_counted() -> None:
    async with store_client() as client:
        client.session.session_id += 1
        before = refusals(UnknownSession)
        with pytest.raises(UnknownSession):
            await client.offer(CHAIN)
        assert refusals(UnknownSession) == before + 1


async def test_a_store_without_attached_workers_answers_nothing() -> None:
    async with unused_store() as client:
        assert (await client.match(CHAIN)).blocks == 0
        status = await client.status()
        assert status.tiers[0].total_blocks == 0 and status.store_id == "s"
        with pytest.raises(UnknownSession):
            await client.offer(CHAIN)


async def test_stores_that_share_a_redis_know_of_each_others_blocks() -> None:
    with running_valkey() as valkey:
        configs = [store_config(store_id=name, index={"redis_url": valkey.connection_url}) for name in "ab"]
        async with store_client(configs[0]) as a, store_client(configs[1]) as b:
            await a.store(CHAIN[:2])
            await b.store(CHAIN[:5])
            for client in (a, b):
                await eventually_matches(client, ("b", 5))
                assert (await client.match(CHAIN)).epoch == b.session.epoch


async def eventually_matches(client: Client, expected: tuple[str, int]) -> None:
    async def matches() -> bool:
        matched = await client.match(CHAIN)
        return (matched.store_id, matched.blocks) == expected

    await eventually(matches)
