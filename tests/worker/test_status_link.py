"""Workers and their scheduler over loopback gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import grpc
import pytest
from deepmesh.internal.v1 import scheduler_pb2, workers_pb2

from engine.config import EngineConfig
from mesh.blocks import chain_hashes
from mesh.config import ServerConfig
from mesh.domain.worker_wire import identity_message
from mesh.domain.workers import WorkerLoad, WorkerRole
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from mesh.rpc.server import MeshServer, Registration
from tests.support.decode_server import gateway_client, running_worker
from tests.support.decoding import READY
from tests.support.scheduler_server import running_scheduler, scheduler_stub
from tests.support.waiting import eventually
from worker.identity import worker_identity
from worker.status_link import HEARTBEATS_A_LEASE, StatusLink
from worker.status_report import StatusReport

ENGINE = EngineConfig(backend="oracle")
LEASE = 1.5
SERVICE = "deepmesh.internal.v1.SchedulerService"


class LinkedWorker:
    """A status link without the worker."""

    def __init__(self, endpoint: str, worker_id: str, incarnation: str = "first") -> None:
        self.report = StatusReport(READY.total_blocks)
        identity = worker_identity(READY, WorkerRole.DECODE, worker_id, incarnation, f"{worker_id}:1", ENGINE)
        self.link = StatusLink(endpoint, identity, self.report, 0.01, Channels())

    @asynccontextmanager
    async def running(self) -> AsyncIterator["LinkedWorker"]:
        task = asyncio.create_task(self.link.run())
        yield self
        task.cancel()

    def observe(self, load: WorkerLoad, stored: list[bytes]) -> None:
        self.report.observe(load, stored, [])


async def seen(endpoint: str) -> list[scheduler_pb2.WorkerStatus]:
    async with scheduler_stub(endpoint) as stub:
        call = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        workers = list((await call.read()).workers)
        call.cancel()
        return workers


async def until_seen(endpoint: str, condition: Any) -> list[scheduler_pb2.WorkerStatus]:
    workers: list[scheduler_pb2.WorkerStatus] = []

    async def is_seen() -> bool:
        workers[:] = await seen(endpoint)
        return bool(condition(workers))

    await eventually(is_seen)
    return workers


async def test_two_workers_stand_in_the_registry_with_load_and_blocks() -> None:
    async with (
        running_scheduler() as endpoint,
        LinkedWorker(endpoint, "a").running() as first,
        LinkedWorker(endpoint, "b").running(),
    ):
        await until_seen(endpoint, lambda workers: len(workers) == 2)
        load = WorkerLoad(3, 1, 500, 42, 1000.0, 20.0, 64.0)
        first.observe(load, chain_hashes(list(range(128))))
        workers = await until_seen(endpoint, lambda workers: workers[0].cached_blocks == 2)
        expected = worker_identity(READY, WorkerRole.DECODE, "a", "first", "a:1", ENGINE)
        assert workers[0].identity == identity_message(expected)
        assert (workers[0].load.running_requests, workers[0].load.free_blocks) == (3, 42)
        assert (workers[1].load.free_blocks, workers[1].cached_blocks) == (READY.total_blocks, 0)


async def test_an_idle_worker_keeps_its_lease() -> None:
    left: list[int] = []

    def renewed_for_a_lease(workers: list[scheduler_pb2.WorkerStatus]) -> bool:
        left.extend(worker.lease_remaining.ToMilliseconds() for worker in workers)
        renewals = sum(later > sooner for sooner, later in pairwise(left))
        return renewals > HEARTBEATS_A_LEASE

    async with running_scheduler(lease={"seconds": LEASE}) as endpoint, LinkedWorker(endpoint, "a").running():
        await until_seen(endpoint, renewed_for_a_lease)


async def test_a_worker_that_is_gone_loses_its_lease() -> None:
    async with running_scheduler(lease={"seconds": LEASE}) as endpoint:
        async with LinkedWorker(endpoint, "a").running():
            await until_seen(endpoint, bool)
        await until_seen(endpoint, lambda workers: not workers)


async def test_a_worker_is_known_again_after_its_scheduler_restarted() -> None:
    server = {"port": free_port(), "drain_seconds": 0.1}
    endpoint = f"127.0.0.1:{server['port']}"
    async with LinkedWorker(endpoint, "a").running() as worker:
        async with running_scheduler(server=server):
            await until_seen(endpoint, bool)
            worker.observe(worker.report.load, chain_hashes(list(range(640))))
            await until_seen(endpoint, lambda workers: workers[0].cached_blocks == 10)
        async with running_scheduler(server=server):
            workers = await until_seen(endpoint, lambda workers: workers and workers[0].cached_blocks == 10)
            assert len(workers) == 1


async def test_a_scheduler_that_sends_garbage_is_asked_again() -> None:
    port = free_port()
    endpoint, told = f"127.0.0.1:{port}", asyncio.Event()

    async def garbage(requests: Any, context: Any) -> AsyncIterator[bytes]:
        told.set()
        yield b"\xff\xff\xff\xff not a message"

    def add(servicer: None, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {"ReportStatus": grpc.stream_stream_rpc_method_handler(garbage)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async with LinkedWorker(endpoint, "a").running():
        config = ServerConfig(port=port, drain_seconds=0)
        async with MeshServer(config, "garbage", [Registration(add, None, SERVICE)]):
            await told.wait()
        async with running_scheduler(server={"port": port, "drain_seconds": 0.1}):
            await until_seen(endpoint, bool)


async def test_a_restarted_worker_replaces_its_earlier_incarnation() -> None:
    async with running_scheduler(lease={"seconds": 30}) as endpoint:
        async with LinkedWorker(endpoint, "a", "old").running():
            await until_seen(endpoint, bool)
        async with LinkedWorker(endpoint, "a", "new").running():
            await until_seen(endpoint, lambda workers: [w.identity.incarnation for w in workers] == ["new"])


async def test_draining_is_reported_before_the_worker_goes() -> None:
    async with running_scheduler() as endpoint, LinkedWorker(endpoint, "a").running() as worker:
        await until_seen(endpoint, bool)
        worker.report.drain()
        await worker.link.drain_reported(60)
        assert [status.state for status in await seen(endpoint)] == [workers_pb2.WORKER_STATE_DRAINING]


async def test_a_worker_that_ends_in_order_is_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_scheduler(lease={"seconds": 30}) as endpoint, LinkedWorker(endpoint, "a").running() as worker:
        await until_seen(endpoint, bool)
        worker.report.drain()
        await worker.link.leave(60)
        assert not await seen(endpoint)
        # It does not come back either.
        await asyncio.sleep(0.1)
        assert not await seen(endpoint)
    assert not [record for record in caplog.records if "lost" in record.message]


async def test_an_ending_worker_waits_for_its_first_answer() -> None:
    port, told, may_answer = free_port(), asyncio.Event(), asyncio.Event()
    said_goodbye: list[bool] = []

    async def slow(
        requests: AsyncIterator[scheduler_pb2.ReportStatusRequest], context: Any
    ) -> AsyncIterator[scheduler_pb2.ReportStatusResponse]:
        async for request in requests:
            said_goodbye.append(request.leaving)
            told.set()
            await may_answer.wait()
            response = scheduler_pb2.ReportStatusResponse()
            response.lease.FromSeconds(30)
            yield response

    def add(servicer: None, server: grpc.aio.Server) -> None:
        handler = grpc.stream_stream_rpc_method_handler(
            slow,
            scheduler_pb2.ReportStatusRequest.FromString,
            scheduler_pb2.ReportStatusResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"ReportStatus": handler}),))

    config = ServerConfig(port=port, drain_seconds=0)
    async with (
        MeshServer(config, "slow", [Registration(add, None, SERVICE)]),
        LinkedWorker(f"127.0.0.1:{port}", "a").running() as worker,
    ):
        await told.wait()
        # The scheduler may have read the report before the worker knows that it was written.
        await eventually(lambda: worker.link._connected)
        leaving = asyncio.create_task(worker.link.leave(60))
        await asyncio.sleep(0.05)
        assert not leaving.done()
        may_answer.set()
        await asyncio.wait_for(leaving, 20)
    assert said_goodbye == [False, True]


async def test_a_worker_without_a_scheduler_ends_at_once() -> None:
    async with LinkedWorker(f"127.0.0.1:{free_port()}", "a").running() as worker:
        await asyncio.sleep(0.05)
        await asyncio.wait_for(worker.link.drain_reported(600), 20)
        await asyncio.wait_for(worker.link.leave(600), 20)


async def test_a_placement_finds_the_blocks_that_a_request_left() -> None:
    prompt = list(range(200))
    async with running_scheduler() as endpoint, running_worker() as running, scheduler_stub(endpoint) as stub:
        host = running.worker.host
        task = asyncio.create_task(StatusLink(endpoint, host.identity, host.report, 0.01, Channels()).run())
        async with gateway_client(running.endpoint) as gateway:
            await gateway.ended(await gateway.submit(prompt, 10))
        await until_seen(endpoint, lambda workers: workers and workers[0].cached_blocks == 3)
        request = scheduler_pb2.PlaceRequest(
            generation_id="g",
            request_id="r",
            model="oracle",
            prompt_tokens=200,
            max_tokens=10,
            block_hashes=chain_hashes(prompt),
        )
        response = await stub.Place(request)
        assert response.decode.endpoint == running.endpoint
        assert response.cached_prefixes[0].blocks == 3
        task.cancel()
