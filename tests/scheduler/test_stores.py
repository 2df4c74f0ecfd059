"""KV stores as the scheduler asks them, over real gRPC: a hint where it helps, and never a reason to fail."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from deepmesh.internal.v1 import scheduler_pb2, targets_pb2

from mesh.blocks import chain_hashes
from mesh.ports import free_port
from mesh.rendezvous import rendezvous
from tests.support.fake_store import FakeStore
from tests.support.scheduler_server import ReportingWorker, identity_message, running_scheduler, scheduler_stub
from tests.support.waiting import eventually

PROMPT = list(range(640))
LINK = {"match_ms": 5000.0, "poll_seconds": 0.02}


def place_request(prompt: list[int] = PROMPT) -> scheduler_pb2.PlaceRequest:
    return scheduler_pb2.PlaceRequest(
        generation_id="g",
        request_id="r",
        model="oracle",
        prompt_tokens=len(prompt),
        max_tokens=100,
        block_hashes=chain_hashes(prompt),
    )


async def watched(stub: Any) -> scheduler_pb2.WatchWorkersResponse:
    call = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
    response: scheduler_pb2.WatchWorkersResponse = await call.read()
    call.cancel()
    return response


async def until_found(stub: Any, stores: int) -> None:
    async with asyncio.timeout(60):
        while True:
            if sum(bool(store.store_id) for store in (await watched(stub)).stores) == stores:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def scheduling(*stores: FakeStore, **config: Any) -> AsyncIterator[Any]:
    """A scheduler that has found these stores, with one idle worker whose blocks are of 1 kB."""
    async with asyncio.timeout(60):
        servers = [store.server() for store in stores]
        for server in servers:
            await server.__aenter__()
        endpoints = [server.endpoint for server in servers]
        async with (
            running_scheduler(stores=endpoints, **{"store_link": LINK, **config}) as endpoint,
            scheduler_stub(endpoint) as stub,
        ):
            await ReportingWorker(stub, identity_message("d", block_bytes=1000)).start()
            await until_found(stub, len(stores))
            yield stub
        for server in servers:
            await server.__aexit__(None, None, None)


async def test_a_store_that_holds_the_prefix_is_named_and_listed() -> None:
    async with scheduling(FakeStore(blocks=8)) as stub:
        response = await stub.Place(place_request())
        assert response.store == targets_pb2.StoreTarget(store_id="store-0", blocks=8)
        assert list(response.cached_prefixes) == [scheduler_pb2.CachedPrefix(source_id="store-0", blocks=8)]
        decision = (await stub.ListDecisions(scheduler_pb2.ListDecisionsRequest())).decisions[0]
        assert [candidate.store_id for candidate in decision.candidates] == ["store-0"]
        assert "store-0 asked for 8" in decision.reason


async def test_a_store_is_asked_in_the_workers_namespace() -> None:
    store = FakeStore()
    async with scheduling(store) as stub:
        response = await stub.Place(place_request())
        assert not response.HasField("store")
        assert [len(query.block_hashes) for query in store.queries] == [9]
        assert store.queries[0].kv_namespace == identity_message().kv_namespace


async def test_a_store_is_asked_only_for_what_workers_lack() -> None:
    store = FakeStore(blocks=8)
    async with scheduling(store) as stub:
        events = scheduler_pb2.KvEvents(snapshot=True, stored=chain_hashes(PROMPT)[:8])
        await ReportingWorker(stub, identity_message("e", block_bytes=1000)).start(kv_events=events)
        assert not (await stub.Place(place_request())).HasField("store")
        assert not (await stub.Place(place_request(list(range(1000, 1128))))).HasField("store")
        assert not store.queries


async def test_a_store_that_answers_late_is_no_reason_to_wait() -> None:
    async with scheduling(FakeStore(blocks=8, match_seconds=600), store_link={**LINK, "match_ms": 20.0}) as stub:
        response = await stub.Place(place_request(), timeout=60)
        assert response.decode.worker_id == "d"
        assert not response.HasField("store")


async def test_the_store_that_keeps_the_chain_is_asked() -> None:
    stores = {name: FakeStore(name, blocks=8) for name in ("store-0", "store-1")}
    async with scheduling(*stores.values()) as stub:
        for start in range(6):
            prompt = list(range(1000 * start, 1000 * start + 640))
            keeper = rendezvous(stores, chain_hashes(prompt)[0])
            assert keeper is not None
            assert (await stub.Place(place_request(prompt))).store.store_id == keeper
        assert all(store.queries for store in stores.values())


async def test_a_store_may_name_another_that_shares_its_index() -> None:
    async with scheduling(FakeStore(blocks=8, elsewhere="store-9")) as stub:
        assert (await stub.Place(place_request())).store.store_id == "store-9"


async def test_a_store_that_is_gone_is_not_asked() -> None:
    store, port = FakeStore(blocks=8), free_port()
    config = {"stores": [f"127.0.0.1:{port}"], "store_link": LINK}
    async with running_scheduler(**config) as endpoint, scheduler_stub(endpoint) as stub:
        await ReportingWorker(stub, identity_message("d", block_bytes=1000)).start()
        async with store.server(port):
            await until_found(stub, 1)
        await until_found(stub, 0)
        response = await stub.Place(place_request())
        assert (response.decode.worker_id, response.HasField("store")) == ("d", False)
        assert [shown.endpoint for shown in (await watched(stub)).stores] == [f"127.0.0.1:{port}"]
        async with store.server(port):
            await until_found(stub, 1)
            assert (await stub.Place(place_request())).HasField("store")


async def test_a_store_that_ends_without_a_word_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    store, port = FakeStore(), free_port()
    async with (
        running_scheduler(stores=[f"127.0.0.1:{port}"], store_link=LINK) as endpoint,
        scheduler_stub(endpoint) as stub,
    ):
        for _ in range(2):
            async with store.server(port) as server:
                await server.ready()
                await until_found(stub, 1)
                # It is followed from its next status on.
                await eventually(lambda: bool(server._edge._endless_calls))
            await until_found(stub, 0)
        messages = [record.message for record in caplog.records if record.name == "scheduler.store_link"]
        assert messages == ["KV store found", "KV store stops"] * 2
        async with store.server(port):
            await until_found(stub, 1)
            store.fails = True
            await until_found(stub, 0)
            await eventually(lambda: "KV store lost" in caplog.text)


async def test_watchers_see_what_stores_hold() -> None:
    async with scheduling(FakeStore()) as stub:
        shown = (await watched(stub)).stores[0]
        assert (shown.store_id, shown.lookups, shown.hits, shown.attached_workers) == ("store-0", 3, 2, 1)
        assert [(tier.name, tier.used_blocks, tier.total_blocks) for tier in shown.tiers] == [("memory", 7, 100)]
        assert dict(shown.transfers.received_bytes) == {"tcp": 5}
