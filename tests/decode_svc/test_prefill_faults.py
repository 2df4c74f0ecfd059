"""Prefill workers that refuse, die, hang or make mistakes: the request is placed again, and no other is disturbed."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from deepmesh.v1 import common_pb2

from decode_svc import wire
from decode_svc.prefill_link import PrefillLink
from engine.protocol.messages import LandingOpened, Output, Refusal
from mesh.config import ServerConfig
from mesh.domain.requests import Submission
from mesh.domain.sampling import Sampling
from mesh.errors import EngineFailed, MeshError, NamespaceMismatch, PrefillLost, WorkerDraining, WorkerFull
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from mesh.rpc.server import MeshServer, Registration
from prefill_svc.__main__ import SERVICE
from tests.support.decode_server import AnyTarget, decode_without_rank, gateway_client
from tests.support.fake_prefill import FakePrefill, FakePrefillCall, fake_prefill
from tests.support.prefill_calls import PROMPT, called, ended, lost, rank_of, submitted
from tests.support.prefilling import make_ticket
from tests.support.waiting import eventually


@pytest.mark.parametrize("error", [NamespaceMismatch, WorkerFull, WorkerDraining, EngineFailed])
async def test_a_prefill_worker_that_refuses_has_the_request_placed_again(error: type[MeshError]) -> None:
    before = ended("lost")
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        call.end(error("not here"))
        await gateway.ended(1)
        assert "not here" in lost(gateway).message
        assert rank_of(running).cancelled == [0]
    assert ended("lost") == before + 1


async def test_a_request_without_its_prefill_worker_is_placed_again() -> None:
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        absent = FakePrefill()
        absent.endpoint = f"127.0.0.1:{free_port()}"
        key = await submitted(running, gateway, absent)
        rank_of(running).open_landing(key, make_ticket(len(PROMPT)))
        await gateway.ended(1)
        lost(gateway)


@pytest.mark.parametrize("stage", ["before", "after the first token"])
async def test_a_prefill_worker_that_dies_has_the_request_placed_again(stage: str) -> None:
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        async with fake_prefill() as prefill:
            call = await called(running, gateway, prefill)
            if stage != "before":
                call.first_token()
                await eventually(lambda: bool(rank_of(running).first_tokens))
        await gateway.ended(1)
        lost(gateway)
        assert rank_of(running).cancelled == [0]


async def test_a_prefill_worker_may_die_when_it_is_done() -> None:
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        async with fake_prefill() as prefill:
            await called(running, gateway, prefill)
            rank.emit(rank.step(rank.output(0)), rank.step(rank.output(0)))
            await gateway.until(lambda: len(gateway.requests[1].tokens) == 2)
        await asyncio.sleep(0.1)
        rank.emit(rank.step(rank.output(0, 1, "length")))
        request = await gateway.ended(1)
        assert (request.error, len(request.tokens), rank.cancelled) == (None, 3, [])


async def test_a_prefill_worker_that_hangs_is_lost_with_its_landing() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        key = await submitted(running, gateway, prefill)
        rank_of(running).open_landing(key, make_ticket(len(PROMPT), deadline_ms=200))
        await gateway.ended(1)
        lost(gateway)
        await eventually(lambda: all(call.cancelled for call in prefill.calls))


@pytest.mark.parametrize("says_done", [False, True])
async def test_a_request_whose_kv_is_lost_is_placed_again(says_done: bool) -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        call = await called(running, gateway, prefill)
        done_before = ended("done")
        call.first_token()
        if says_done:
            call.answer(done={"pushed_bytes": 2**40, "transport": "tcp"})
            call.end()
            await eventually(lambda: ended("done") == done_before + 1)
        await gateway.until(lambda: gateway.requests[1].tokens)
        refusal = Refusal(PrefillLost.reason, "a segment's digest was wrong")
        rank.emit(rank.step(Output(0, len(PROMPT) + 1, [], refusal=refusal)))
        request = await gateway.ended(1)
        assert len(request.tokens) == 1
        assert "digest was wrong" in lost(gateway).message
        await eventually(lambda: call.cancelled or says_done)


async def no_first_token(call: FakePrefillCall) -> None:
    call.answer(done={"pushed_bytes": 0})
    call.end()


async def token_out_of_range(call: FakePrefillCall) -> None:
    call.first_token(token_id=100)


async def more_cached_than_there_is(call: FakePrefillCall) -> None:
    call.first_token(worker_cached_tokens=2**32 - 1, store_cached_tokens=2**32 - 1)


async def log_probabilities_not_asked_for(call: FakePrefillCall) -> None:
    call.first_token(logprobs=common_pb2.PositionLogprobs(logprob=-0.5))


@pytest.mark.parametrize(
    "mistake", [no_first_token, token_out_of_range, more_cached_than_there_is, log_probabilities_not_asked_for]
)
async def test_a_prefill_worker_that_makes_mistakes_is_lost(mistake: Any) -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        await mistake(await called(running, gateway, prefill))
        await gateway.ended(1)
        lost(gateway)
        assert not rank_of(running).first_tokens


@pytest.mark.parametrize("alternatives", [None, 1, 3])
async def test_a_first_token_with_wrong_log_probabilities_is_refused(alternatives: int | None) -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill, sampling=Sampling(top_logprobs=2))
        top = [common_pb2.TokenLogprob(token_id=number, logprob=-0.5) for number in range(alternatives or 0)]
        call.first_token(logprobs=None if alternatives is None else common_pb2.PositionLogprobs(logprob=-0.5, top=top))
        await gateway.ended(1)
        lost(gateway)
        assert not rank_of(running).first_tokens


async def test_a_second_first_token_does_not_reach_the_rank() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        call.first_token(42)
        call.first_token(43)
        await gateway.ended(1)
        lost(gateway)
        assert [first.token_id for first in rank_of(running).first_tokens] == gateway.requests[1].tokens == [42]
        await eventually(lambda: call.cancelled)


async def test_a_mistake_in_a_call_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(submission: Submission, opened: LandingOpened) -> Any:
        raise ValueError("Value out of range: -1")

    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        undisturbed = await called(running, gateway, prefill)
        with monkeypatch.context() as patched:
            patched.setattr(wire, "prefill_request", encode)
            key = await submitted(running, gateway, prefill)
            rank.open_landing(key, make_ticket(len(PROMPT), name=2))
            error = (await gateway.ended(2)).error
        assert error is not None
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, MeshError.reason)
        assert rank.cancelled == [key]
        undisturbed.first_token()
        await eventually(lambda: bool(rank.first_tokens))


async def garbage(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"\xff\xff\xff\xff not a message"


def add_garbage(servicer: None, server: grpc.aio.Server) -> None:
    handlers: Any = {"Prefill": grpc.unary_stream_rpc_method_handler(garbage)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def test_a_prefill_worker_that_sends_garbage_is_lost() -> None:
    registration = Registration(add_garbage, None, SERVICE)
    async with (
        decode_without_rank() as running,
        MeshServer(ServerConfig(drain_seconds=0), "garbage", [registration]) as server,
        gateway_client(running.endpoint) as gateway,
    ):
        worker = FakePrefill()
        worker.endpoint = server.endpoint
        key = await submitted(running, gateway, worker)
        rank_of(running).open_landing(key, make_ticket(len(PROMPT)))
        await gateway.ended(1)
        assert "malformed" in lost(gateway).message


async def test_a_call_ends_when_its_worker_is_unlisted() -> None:
    before, registered = ended("lost"), AnyTarget()
    registered.forgets = True
    async with (
        decode_without_rank(prefill_link=PrefillLink(Channels(), registered)) as running,
        fake_prefill() as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        call = await called(running, gateway, prefill)
        # Its prompt came before the news of it.
        running.worker.prefills.on_tick()
        registered.forgets = False
        running.worker.prefills.on_tick()
        registered.forgets = True
        running.worker.prefills.on_tick()
        await gateway.ended(1)
        assert "no scheduler has listed it for a lease" in lost(gateway).message
        await eventually(lambda: call.cancelled)
    assert ended("lost") == before + 1


@pytest.mark.parametrize("landed", [False, True])
async def test_a_sent_prompt_is_lost_with_its_worker(landed: bool) -> None:
    done_before, registered = ended("done"), AnyTarget()
    async with (
        decode_without_rank(prefill_link=PrefillLink(Channels(), registered)) as running,
        fake_prefill() as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        rank, call = rank_of(running), await called(running, gateway, prefill)
        running.worker.prefills.on_tick()
        call.first_token()
        call.answer(done={"pushed_bytes": 1024, "transport": "tcp"})
        call.end()
        await eventually(lambda: ended("done") == done_before + 1)
        tokens = 2 if landed else 1
        rank.emit(*(rank.step(rank.output(0)) for _ in range(tokens - 1)))
        await gateway.until(lambda: len(gateway.requests[1].tokens) == tokens)
        registered.forgets = True
        running.worker.prefills.on_tick()
        if landed:
            rank.emit(rank.step(rank.output(0, 1, "length")))
        request = await gateway.ended(1)
        assert len(request.tokens) == 1 + 2 * landed
        assert rank.cancelled == ([] if landed else [0])
        if landed:
            assert request.error is None
        else:
            assert "no scheduler has listed it for a lease" in lost(gateway).message
