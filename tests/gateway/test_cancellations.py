"""Clients that cancel, run out of time or do not read: the work stops, and nothing is left."""

import asyncio
from typing import Any, NoReturn

import grpc
import pytest
from deepmesh.internal.v1 import scheduler_pb2
from deepmesh.v1 import common_pb2, gateway_pb2_grpc

from gateway.config import LimitsConfig
from gateway.links.scheduler_link import SchedulerLink
from mesh.errors import SchedulerUnavailable
from mesh.rpc.failures import from_rpc_error
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens
from tests.support.gateways import collect, direct, ids_request, running_mesh
from tests.support.refusals import refused
from tests.support.waiting import eventually

# It does not grow: 1,100 tokens fill it, where they were 17,000.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0)]


async def test_a_client_that_cancels_stops_the_work() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.005)) as mesh:
        call = mesh.stub.Generate(ids_request(max_tokens=3000))
        await call.read()
        await call.read()
        call.cancel()
        await eventually(lambda: len(mesh.worker.cancelled) == 1)


async def test_a_placement_whose_client_has_left_is_given_up() -> None:
    async with running_mesh() as mesh:
        mesh.scheduler.answer_seconds = 60
        call = mesh.stub.Generate(ids_request())
        await eventually(lambda: len(mesh.scheduler.queries) == 1)
        call.cancel()
        await eventually(lambda: len(mesh.scheduler.outcomes) == 1)
        (query,), (report,) = mesh.scheduler.queries, mesh.scheduler.outcomes
        assert (report.generation_id, report.attempt) == (query.generation_id, query.attempt)
        assert report.outcome == scheduler_pb2.PLACEMENT_OUTCOME_CANCELLED


async def test_a_deadline_of_one_millisecond_leaves_nothing() -> None:
    async with running_mesh() as mesh:
        error = await refused(collect(mesh, ids_request(), timeout=0.001))
        assert error.code.name == "DEADLINE_EXCEEDED"


async def test_a_deadline_during_the_answer_stops_the_work() -> None:
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01)) as mesh:
        # Where the machine is so busy that it ended before the answer began, once more.
        while not mesh.worker.submissions:
            error = await refused(collect(mesh, ids_request(max_tokens=4000), timeout=0.5))
            assert error.code.name == "DEADLINE_EXCEEDED"
        assert 0 < mesh.worker.submissions[0].deadline_ms <= 500


async def test_the_gateways_own_deadline_holds_where_the_client_sets_none() -> None:
    limits = LimitsConfig(generation_seconds=0.2)
    async with running_mesh(FakeDecodeWorker(step_seconds=0.01), limits=limits) as mesh:
        error = await refused(collect(mesh, ids_request(max_tokens=4000), timeout=None))
        assert (error.code.name, error.reason) == ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED")


async def test_the_deadline_holds_where_a_placement_fails_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of gRPC that fails as it is cancelled raises its own error."""

    async def place(*query: Any) -> NoReturn:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise SchedulerUnavailable("none answers") from None
        raise AssertionError("the call ended by itself")

    monkeypatch.setattr(SchedulerLink, "place", place)
    async with running_mesh(limits=LimitsConfig(generation_seconds=0.5)) as mesh:
        error = await refused(collect(mesh, ids_request(), timeout=None))
        assert error.code.name == "DEADLINE_EXCEEDED"
        # Otherwise the gateway places the request by its snapshot.
        assert not mesh.worker.submissions


@direct
async def test_only_the_client_that_does_not_read_ends() -> None:
    worker = FakeDecodeWorker(context_tokens=200_000, tokens_per_step=50)
    async with (
        running_mesh(worker, limits=LimitsConfig(unread_tokens=500)) as mesh,
        grpc.aio.insecure_channel(f"127.0.0.1:{mesh.grpc_port}", SMALL_WINDOW) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        idle = stub.Generate(ids_request(max_tokens=150_000, sampling=common_pb2.SamplingParams(top_logprobs=20)))
        await idle.read()
        await eventually(lambda: len(worker.cancelled) == 1, 60)
        answer = await collect(mesh, ids_request(max_tokens=100))
        assert answer.token_ids == oracle_tokens([5, 6, 7], 100)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await idle.read() is not grpc.aio.EOF:
                pass
        assert from_rpc_error(caught.value).reason == "SLOW_CLIENT"


async def test_a_client_that_stops_reading_is_cut_off() -> None:
    worker = FakeDecodeWorker(context_tokens=200_000, tokens_per_step=50)
    limits = LimitsConfig(unread_tokens=1_000_000, stalled_seconds=0.3)
    async with running_mesh(worker, limits=limits) as mesh:
        idle = mesh.stub.Generate(ids_request(max_tokens=2000, sampling=common_pb2.SamplingParams(top_logprobs=20)))
        await idle.read()
        await eventually(lambda: mesh.gateway.dispatcher.live_generations == 1)
        await eventually(lambda: mesh.gateway.dispatcher.live_generations == 0)
        idle.cancel()
