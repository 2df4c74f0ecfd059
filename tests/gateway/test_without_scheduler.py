"""Placement from the last snapshot, and its end."""

import asyncio

import grpc
import pytest

from gateway.config import DispatchConfig
from mesh.errors import NoWorkerYet, RemoteError
from mesh.rpc.failures import from_rpc_error
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens
from tests.support.gateways import collect, dispatch, ids_request, running_mesh
from tests.support.waiting import eventually


async def test_requests_are_placed_from_the_snapshot_for_one_lease() -> None:
    workers = (FakeDecodeWorker(), FakeDecodeWorker(worker_id="decode-1"))
    async with running_mesh(*workers, dispatch=dispatch(worker_seconds=0.1)) as mesh:
        await eventually(lambda: len(mesh.gateway.directory.incarnations()) == 2)
        # So long may the machine take for one answer.
        mesh.scheduler.lease_seconds = 4.0
        mesh.scheduler.remove("decode-1")
        await eventually(lambda: len(mesh.gateway.directory.incarnations()) == 1)
        await mesh.scheduler_server.__aexit__(None, None, None)
        answer = await collect(mesh, ids_request())
        assert answer.token_ids == oracle_tokens([5, 6, 7], 8)
        await eventually(lambda: not mesh.gateway.available)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(mesh, ids_request())
        error = from_rpc_error(caught.value)
        assert (error.code.name, error.reason) == ("UNAVAILABLE", "SCHEDULER_UNAVAILABLE")


async def test_a_request_waits_for_the_only_scheduler() -> None:
    workers = (FakeDecodeWorker(), FakeDecodeWorker(worker_id="decode-1"))
    async with running_mesh(*workers, dispatch=dispatch(worker_seconds=60.0)) as mesh:
        await eventually(lambda: len(mesh.gateway.directory.incarnations()) == 2)
        mesh.scheduler.lease_seconds = 0.1
        mesh.scheduler.remove("decode-1")
        await eventually(lambda: len(mesh.gateway.directory.incarnations()) == 1)
        port = mesh.scheduler_server.port
        await mesh.scheduler_server.__aexit__(None, None, None)
        await eventually(lambda: not mesh.gateway.available)
        answer = asyncio.create_task(collect(mesh, ids_request()))
        done, _ = await asyncio.wait([answer], timeout=0.5)
        assert not done
        async with mesh.scheduler.server(port):
            assert (await answer).token_ids == oracle_tokens([5, 6, 7], 8)


async def test_live_requests_outlive_the_scheduler() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        call = mesh.stub.Generate(ids_request(max_tokens=50))
        await call.read()
        await mesh.scheduler_server.__aexit__(None, None, None)
        tokens: list[int] = []
        while (message := await call.read()) is not grpc.aio.EOF:
            tokens.extend(message.delta.token_ids)
        assert tokens == oracle_tokens([5, 6, 7], 50)


async def test_a_scheduler_that_hangs_is_done_without() -> None:
    async with running_mesh(dispatch=DispatchConfig(answer_seconds=60.0, place_seconds=0.2)) as mesh:
        mesh.scheduler.answer_seconds = 60.0
        answer = await collect(mesh, ids_request())
        assert answer.token_ids == oracle_tokens([5, 6, 7], 8)


async def test_a_scheduler_that_hangs_costs_one_request_its_deadline() -> None:
    async with running_mesh(dispatch=DispatchConfig(answer_seconds=2.0)) as mesh:
        await collect(mesh, ids_request())
        mesh.scheduler.answer_seconds = 60.0
        for _ in range(10):
            assert (await collect(mesh, ids_request())).token_ids == oracle_tokens([5, 6, 7], 8)
        # The one that waited for it, and the one before it hung.
        assert len(mesh.scheduler.queries) == 2


async def test_a_scheduler_that_answers_again_is_asked_again() -> None:
    async with running_mesh(dispatch=DispatchConfig(answer_seconds=0.05, place_seconds=0.1)) as mesh:
        mesh.scheduler.answer_seconds = 60.0
        await collect(mesh, ids_request())
        mesh.scheduler.answer_seconds = 0.0

        before = len(mesh.scheduler.queries)
        while len(mesh.scheduler.queries) == before:
            await collect(mesh, ids_request())


async def test_a_scheduler_without_workers_is_done_without() -> None:
    async with running_mesh() as mesh:
        mesh.scheduler.refusals = [NoWorkerYet("none yet", retry_after_ms=1000) for _ in range(3)]
        for _ in range(3):
            assert (await collect(mesh, ids_request())).token_ids == oracle_tokens([5, 6, 7], 8)


async def test_a_scheduler_that_fails_otherwise_is_believed() -> None:
    async with running_mesh() as mesh:
        mesh.scheduler.refusals.append(RemoteError("bug", code=grpc.StatusCode.INTERNAL, reason="BUG"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(mesh, ids_request())
        assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_a_new_scheduler_loses_no_request() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        call = mesh.stub.Generate(ids_request(max_tokens=100))
        await call.read()
        port = mesh.scheduler_server.port
        await mesh.scheduler_server.__aexit__(None, None, None)
        mesh.scheduler.workers.clear()
        async with mesh.scheduler.server(port):
            tokens: list[int] = []
            while (message := await call.read()) is not grpc.aio.EOF:
                tokens.extend(message.delta.token_ids)
        assert tokens == oracle_tokens([5, 6, 7], 100)
        assert len(mesh.worker.submissions) == 1
