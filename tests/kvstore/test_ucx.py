"""Stores and workers that really move bytes."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deepmesh.internal.v1 import kvstore_pb2

from launcher.process import Child
from mesh.blocks import chain_hashes
from mesh.domain import worker_wire
from mesh.observe.metrics import STORE_OFFERS
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tests.support.far_memory import FarMemory
from tests.support.forking import forked_services
from tests.support.metric_values import value_of
from tests.support.moving_store import (
    CHAIN,
    PIECE_BYTES,
    SMALL_SLOTS,
    attached_worker,
    store_and_worker,
)
from tests.support.slow_memory import LateMemory
from tests.support.valkey import running_valkey
from tests.support.waiting import eventually
from transfer.fetch.fetcher import Fetcher
from transfer.host_memory import HostMemory
from transfer.memory import Done, KvMemory, Pool
from transfer.seal import Kind
from transfer.ticket import StoreSession


@pytest.mark.parametrize("place", [HostMemory, LateMemory])
@pytest.mark.parametrize("map_stores", [False, True])
@pytest.mark.parametrize("blocks", [1, 5, 6, 16])
async def test_what_one_worker_stored_another_fetches(
    blocks: int, map_stores: bool, place: Callable[[Pool], KvMemory]
) -> None:
    async with store_and_worker() as first:
        await first.offer(blocks)
        async with attached_worker(first.endpoint, map_stores=map_stores, place=place) as second:
            assert await asyncio.to_thread(second.fetch, 16) == blocks
            assert (set(second.worker.agent.counters().received_bytes) == {"mapped"}) == map_stores
        status = await first.status()
        assert (status.lookups, status.hits) == (1, 1)


@pytest.mark.parametrize("secret", [None, b"of all workers"], ids=["trusted", "checked"])
async def test_stores_exchange_host_memory_alone(secret: bytes | None) -> None:
    async with (
        store_and_worker() as first,
        attached_worker(first.endpoint, map_stores=False, place=FarMemory, secret=secret) as second,
    ):
        await second.offer(9)
        assert await asyncio.to_thread(second.fetch, 16) == 9


async def test_a_store_with_larger_slots_uses_its_workers_segment_size() -> None:
    larger = SMALL_SLOTS.model_copy(update={"slot_bytes": 1 << 20})
    async with store_and_worker(transfer=larger.model_dump()) as worker:
        await worker.offer(16)
        assert await asyncio.to_thread(worker.fetch, 16) == 16


async def test_a_chain_grows_block_by_block() -> None:
    async with store_and_worker() as worker:
        for blocks in (1, 2, 3, 9):
            await worker.offer(blocks)
            assert worker.fetch(16) == blocks


async def test_a_lookup_that_matches_nothing_brings_nothing() -> None:
    async with store_and_worker() as worker:
        await worker.offer(4)
        assert worker.worker.fetch("s", chain_hashes(range(1, 65)), [16]).blocks == 0
        assert worker.worker.fetch("s", CHAIN[1:3], [16, 17]).blocks == 2
        status = await worker.status()
        assert (status.lookups, status.hits) == (2, 1)


async def test_other_weights_find_nothing_of_the_same_chain() -> None:
    async with store_and_worker() as worker:
        await worker.offer(4)
        async with attached_worker(worker.endpoint, weights="other") as other:
            assert other.fetch(4) == 0
            await other.offer(2)
            assert other.fetch(4) == 2


async def test_a_worker_that_cannot_map_the_store_fetches_over_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_and_worker() as first:
        await first.offer(4)

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("not this user's")

        monkeypatch.setattr("transfer.fetch.mapped_slab.map_memory", refuse)
        async with attached_worker(first.endpoint) as second:
            assert await asyncio.to_thread(second.fetch, 4) == 4
            assert "mapped" not in second.worker.agent.counters().received_bytes


async def test_a_store_frees_blocks_that_nobody_confirms(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the worker had died while it copied."""
    async with store_and_worker() as first, attached_worker(first.endpoint, fetch_seconds=2.0) as second:
        await first.offer(4)
        tell = Fetcher._tell

        def lose_receipts(self: Fetcher, store: StoreSession, tag: int, kind: Kind, message: Any) -> None:
            if kind is not Kind.RECEIPT:
                tell(self, store, tag, kind, message)

        monkeypatch.setattr(Fetcher, "_tell", lose_receipts)
        found = await asyncio.to_thread(second.worker.fetch, "s", CHAIN[:4], range(16, 20))
        # Nor does the worker count what the store has not confirmed, but how long it has waited.
        assert found.blocks == 0 and found.error is not None
        assert second.worker.agent.counters().fetch_bytes_per_second is not None
        await second.until_quiet()


async def test_a_session_with_the_wrong_key_is_refused_and_counted() -> None:
    # Nothing answers.
    async with store_and_worker() as first, attached_worker(first.endpoint, fetch_seconds=0.5) as worker:
        await worker.offer(4)
        session = worker.worker.sessions["s"]
        worker.worker.agent.attach_store(msgspec.structs.replace(session, session_key=bytes(32)))
        fetched = await asyncio.to_thread(worker.worker.fetch, "s", CHAIN[:4], range(16, 20))
        assert fetched.blocks == 0 and fetched.error is not None

        async def refused() -> bool:
            return sum((await worker.status()).transfers.refused.values()) == 1

        # The worker waits for its own time, not for the store to have looked.
        await eventually(refused)


def corrupted(gather: Callable[..., Done[bytes]]) -> Callable[..., Done[bytes]]:
    """What is sent differs in one bit from what is announced."""

    def corrupted(
        self: HostMemory, first: int, count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Done[bytes]:
        checksum = gather(self, first, count, blocks, staging, key)
        staging[PIECE_BYTES // 2] ^= 1
        return checksum

    return corrupted


async def test_a_corrupted_segment_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with store_and_worker(offer_seconds=30) as worker:
        failed = STORE_OFFERS.labels("failed")
        before = value_of(failed)
        with monkeypatch.context() as patch:
            patch.setattr(HostMemory, "gather", corrupted(HostMemory.gather))
            worker.client.offer(CHAIN[:4])
            # Until the worker knows, it offers none of them again.
            await eventually(lambda: worker.worker.deliver(worker.client) == [] and value_of(failed) > before)
        await worker.until_quiet()
        assert worker.fetch(4) == 0
        status = await worker.status()
        assert status.tiers[0].used_blocks == 0
        assert dict(status.transfers.refused) == {"wrong_checksum": 1}
        await worker.offer(4)
        assert worker.fetch(4) == 4


async def test_an_offer_without_a_push_leaves_nothing_after_its_deadline() -> None:
    async with store_and_worker(offer_seconds=0.5) as worker:
        session_id = worker.worker.sessions["s"].session_id
        offer = kvstore_pb2.OfferRequest(session_id=session_id, block_hashes=CHAIN[:4])
        wanted = (await worker.stub.Offer(offer)).wanted

        async def empty() -> bool:
            return not (await worker.status()).tiers[0].used_blocks

        await eventually(empty)
        assert list((await worker.stub.Offer(offer)).wanted) == list(wanted) == [0, 1, 2, 3]


async def test_a_store_without_redis_answers_fetches_and_publishes_later() -> None:
    port = free_port()
    async with store_and_worker(index={"redis_url": f"redis://127.0.0.1:{port}", "lease_seconds": 0.6}) as worker:
        worker.client.offer(CHAIN[:4])
        await eventually(lambda: worker.worker.deliver(worker.client) == [] and worker.fetch(4) == 4)
        namespace = worker_wire.namespace_message(worker.worker.namespace)
        request = kvstore_pb2.MatchPrefixRequest(kv_namespace=namespace, block_hashes=CHAIN)
        assert (await worker.stub.MatchPrefix(request)).blocks == 0

        async def told() -> bool:
            return bool((await worker.stub.MatchPrefix(request)).blocks == 4)

        with running_valkey(port):
            await eventually(told)
            assert worker.fetch(4) == 4


@pytest.mark.parametrize("transports", [None, "tcp", "posix,self"])
async def test_a_killed_store_comes_back_empty_and_is_filled_again(transports: str | None) -> None:
    port = free_port()
    settings = {"server.port": port, "store_id": "s", "memory_bytes": 1 << 20}
    settings |= {f"transfer.{key}": getattr(SMALL_SLOTS, key) for key in ("slot_bytes", "slots")}
    if transports is not None:
        settings["transfer.transports"] = f"'{transports}'"
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    endpoint = f"127.0.0.1:{port}"
    async with AsyncExitStack() as stack:
        stack.enter_context(forked_services())
        first = Child("kvstore", [sys.executable, "-m", "kvstore", *options], lambda *_: None)
        await first.start()
        stack.push_async_callback(first.stop, 1.0)
        await first.wait_ready(endpoint, Channels(), 90)
        worker = await stack.enter_async_context(
            attached_worker(endpoint, transports=transports, map_stores=transports is None)
        )
        await worker.offer(8)
        assert await asyncio.to_thread(worker.fetch, 8) == 8
        epoch = worker.worker.sessions["s"].epoch
        os.kill(first.process_id, signal.SIGKILL)
        await eventually(lambda: not worker.worker.sessions)
        second = Child("kvstore", [sys.executable, "-m", "kvstore", *options], lambda *_: None)
        await second.start()
        stack.push_async_callback(second.stop, 1.0)
        await eventually(lambda: bool(worker.worker.sessions))
        assert worker.worker.sessions["s"].epoch != epoch
        assert await asyncio.to_thread(worker.fetch, 8) == 0
        await worker.offer(8)
        assert await asyncio.to_thread(worker.fetch, 8) == 8


async def test_a_store_reports_disk_blocks_and_workers_measure_each_tier(tmp_path: Path) -> None:
    disk = {"path": tmp_path, "bytes": 2 << 20, "least_uses": 0}
    async with store_and_worker(disk=disk) as first:
        await first.offer(10)
        assert (await first.matched()).disk_blocks == 0

        async def written() -> bool:
            return (await first.status()).tiers[1].used_blocks == 10

        await eventually(written)
    async with store_and_worker(disk=disk) as second:

        async def all_matched() -> bool:
            return (await second.matched()).blocks == 10

        await eventually(all_matched)
        assert (await second.matched()).disk_blocks == 10
        assert await asyncio.to_thread(second.fetch, 4) == 4
        await second.until_quiet()
        found = await second.matched()
        assert (found.blocks, found.disk_blocks) == (10, 6)
        counters = second.worker.agent.counters()
        assert counters.disk_fetch_bytes_per_second is not None and counters.fetch_bytes_per_second is None
        assert await asyncio.to_thread(second.fetch, 4) == 4
        assert second.worker.agent.counters().fetch_bytes_per_second is not None
