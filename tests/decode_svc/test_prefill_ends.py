"""However a request ends, its call to the prefill worker ends with it."""

import asyncio

import msgspec
import pytest
from deepmesh.internal.v1 import decode_pb2
from deepmesh.v1 import common_pb2

from engine.protocol.messages import FirstToken
from mesh.errors import DeadlineExceeded, EngineFailed
from tests.support.decode_server import decode_without_rank, gateway_client
from tests.support.fake_prefill import fake_prefill
from tests.support.fake_rank import TRANSFER_READY
from tests.support.prefill_calls import PROMPT, called, ended, rank_of, submitted
from tests.support.prefilling import make_ticket
from tests.support.waiting import eventually


@pytest.mark.parametrize("stage", ["waiting", "landing", "after the first token"])
async def test_cancelling_ends_the_call_at_any_stage(stage: str) -> None:
    before = ended("cancelled")
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        if stage == "waiting":
            await submitted(running, gateway, prefill)
        else:
            call = await called(running, gateway, prefill)
        if stage == "after the first token":
            call.first_token()
            await eventually(lambda: bool(rank.first_tokens))
        await gateway.send(cancellation=decode_pb2.Cancellation(stream_id=1))
        await eventually(lambda: rank.cancelled == [0])
        rank.emit(rank.step(rank.output(0, 0, "cancelled")))
        request = await gateway.ended(1)
        assert request.finished == common_pb2.FINISH_REASON_CANCELLED
        if stage == "waiting":
            # The messages crossed.
            rank.open_landing(0, make_ticket(len(PROMPT)))
            await asyncio.sleep(0.05)
            assert not prefill.calls
        else:
            await eventually(lambda: call.cancelled)
    assert ended("cancelled") == before + (stage != "waiting")


@pytest.mark.parametrize(
    ("stop", "finish"),
    [
        (decode_pb2.StopConditions(max_tokens=1), common_pb2.FINISH_REASON_LENGTH),
        (decode_pb2.StopConditions(max_tokens=9, token_ids=[42]), common_pb2.FINISH_REASON_STOP),
        (decode_pb2.StopConditions(max_tokens=1, token_ids=[42]), common_pb2.FINISH_REASON_STOP),
        (decode_pb2.StopConditions(max_tokens=9), common_pb2.FINISH_REASON_STOP),
    ],
    ids=["length", "stop token", "stop token at max_tokens", "end of sequence"],
)
async def test_a_request_that_ends_at_once_cancels_its_prompt(stop: decode_pb2.StopConditions, finish: int) -> None:
    token_id = 41 if finish == common_pb2.FINISH_REASON_LENGTH else 42
    ready = msgspec.structs.replace(TRANSFER_READY, eos_token_ids=frozenset({42}))
    async with (
        decode_without_rank(ready) as running,
        fake_prefill() as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        rank, call = rank_of(running), await called(running, gateway, prefill, stop=stop)
        call.first_token(token_id)
        request = await gateway.ended(1)
        assert (request.error, request.finished, request.tokens) == (None, finish, [token_id])
        await eventually(lambda: call.cancelled)
        assert (rank.cancelled, rank.first_tokens) == ([0], [])
        # The rank's last word of it is no news.
        rank.emit(rank.step(rank.output(0, 0, "cancelled")))


async def test_a_request_that_ignores_ends_continues_after_one() -> None:
    ready = msgspec.structs.replace(TRANSFER_READY, eos_token_ids=frozenset({42}))
    async with (
        decode_without_rank(ready) as running,
        fake_prefill() as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        stop = decode_pb2.StopConditions(max_tokens=9, ignore_eos=True)
        call = await called(running, gateway, prefill, stop=stop)
        call.first_token(42)
        await gateway.until(lambda: gateway.requests[1].tokens)
        assert rank_of(running).first_tokens == [FirstToken(0, 42)]


async def test_the_deadline_of_a_request_ends_its_call() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        key = await submitted(running, gateway, prefill, deadline_ms=200)
        rank_of(running).open_landing(key, make_ticket(len(PROMPT)))
        request = await gateway.ended(1)
        assert isinstance(request.error, DeadlineExceeded)
        await eventually(lambda: all(call.cancelled for call in prefill.calls))


async def test_a_gateway_that_hangs_up_for_good_ends_its_calls() -> None:
    async with decode_without_rank(grace_seconds=0.1) as running, fake_prefill() as prefill:
        async with gateway_client(running.endpoint) as gateway:
            call = await called(running, gateway, prefill)
        await eventually(lambda: call.cancelled)
        assert rank_of(running).cancelled == [0]


async def test_the_death_of_the_rank_ends_calls_and_requests() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        rank_of(running).die()
        assert isinstance((await gateway.ended(1)).error, EngineFailed)
        await eventually(lambda: call.cancelled)
