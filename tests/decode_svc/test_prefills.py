"""Prompts that prefill workers compute: a decode worker's calls, over loopback gRPC, with a rank that does as told."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest
from deepmesh.internal.v1 import decode_pb2, targets_pb2
from deepmesh.v1 import common_pb2

from decode_svc import prefill_link, wire
from decode_svc.prefill_link import PrefillLink
from engine.protocol.messages import FirstToken, LandingOpened, Output, Refusal
from mesh.blocks import BLOCK_TOKENS
from mesh.channel import Channels
from mesh.config import ServerConfig
from mesh.domain.outputs import Logprobs
from mesh.domain.requests import Submission
from mesh.domain.sampling import Sampling
from mesh.errors import (
    DeadlineExceeded,
    EngineFailed,
    MeshError,
    NamespaceMismatch,
    PlaceAgain,
    PrefillLost,
    WorkerDraining,
    WorkerFull,
)
from mesh.metrics import DECODE_CACHED_TOKENS, DECODE_OUTPUT_TOKENS, DECODE_PREFILLS
from mesh.ports import free_port
from mesh.server import MeshServer, Registration
from prefill_svc.__main__ import SERVICE
from tests.support.decode_server import (
    AnyTarget,
    GatewayClient,
    RunningWorker,
    decode_without_rank,
    gateway_client,
)
from tests.support.fake_prefill import FakePrefill, FakePrefillCall, fake_prefill
from tests.support.fake_rank import TRANSFER_READY, FakeRankClient
from tests.support.prefilling import make_ticket
from tests.support.waiting import eventually
from transfer.ticket import Ticket
from transfer.wire import ticket

PROMPT = [number % 100 for number in range(150)]


def ended(outcome: str) -> float:
    return float(DECODE_PREFILLS.labels(outcome)._value.get())


def target(prefill: FakePrefill) -> targets_pb2.WorkerTarget:
    return targets_pb2.WorkerTarget(worker_id="prefill-1", incarnation="first", endpoint=prefill.endpoint)


def rank_of(running: RunningWorker) -> FakeRankClient:
    assert running.rank is not None
    return running.rank


async def submitted(running: RunningWorker, gateway: GatewayClient, prefill: FakePrefill, **fields: Any) -> int:
    """Submit PROMPT, to be computed there; returns the rank's key."""
    key = len(rank_of(running).submitted)
    await gateway.submit(PROMPT, 10, prefill=target(prefill), **fields)
    await eventually(lambda: key in rank_of(running).submitted)
    return key


async def called(
    running: RunningWorker, gateway: GatewayClient, prefill: FakePrefill, landing: Ticket | None = None, **fields: Any
) -> FakePrefillCall:
    """Have a landing opened for PROMPT, and the prefill worker called."""
    number = len(prefill.calls)
    key = await submitted(running, gateway, prefill, **fields)
    rank_of(running).open_landing(key, landing or make_ticket(len(PROMPT), name=number + 1))
    return await prefill.call(number)


def lost(gateway: GatewayClient, stream_id: int = 1) -> PrefillLost:
    error = gateway.requests[stream_id].error
    assert isinstance(error, PrefillLost)
    assert (error.code.name, error.metadata) == ("ABORTED", {"worker_id": "prefill-1"})
    return error


async def test_a_prompt_is_sent_with_its_landing_and_its_tokens_come_back() -> None:
    done_before = ended("done")
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        rank, landing = rank_of(running), make_ticket(len(PROMPT), held_blocks=1)
        store = targets_pb2.StoreTarget(store_id="store-1", blocks=2)
        sampling = Sampling(temperature=0.5, seed=7, top_logprobs=1)
        fields = {"cache_salt": b"salt", "store": store, "attempt": 3, "prompt_tokens": 9}
        await gateway.submit(PROMPT, 10, sampling, prefill=target(prefill), **fields)
        await eventually(lambda: bool(rank.submitted))
        assert (rank.submitted[0].remote_prefill, rank.submitted[0].request.attempt, rank.submitted[0].fetch) == (
            True,
            3,
            None,
        )
        rank.open_landing(0, landing, held_blocks=1)
        call = await prefill.call()
        sent = call.request
        assert (list(sent.token_ids), sent.prompt_tokens, sent.held_blocks, sent.attempt) == (PROMPT, 9, 1, 3)
        assert (sent.request_id, sent.cache_salt, sent.store) == ("r1", b"salt", store)
        assert (sent.sampling.temperature, sent.sampling.seed, sent.sampling.top_logprobs) == (0.5, 7, 1)
        assert ticket(sent.ticket) == landing
        top = [common_pb2.TokenLogprob(token_id=42, logprob=-0.5)]
        logprobs = common_pb2.PositionLogprobs(logprob=-0.5, top=top)
        call.first_token(worker_cached_tokens=64, store_cached_tokens=64, logprobs=logprobs)
        call.answer(done={"pushed_bytes": 1024, "transport": "tcp"})
        call.end()
        await eventually(lambda: rank.first_tokens == [FirstToken(0, 42)])
        # Else the request may end before its call.
        await eventually(lambda: ended("done") == done_before + 1)
        rank.emit(rank.step(rank.output(0, 9, "length", [Logprobs(-0.5, [42], [-0.5])] * 9)))
        request = await gateway.ended(1)
        assert (request.error, len(request.tokens), len(request.logprobs)) == (None, 10, 10)
        assert not call.cancelled
    assert ended("done") == done_before + 1


async def test_a_first_token_goes_out_before_the_rank_knows_of_it() -> None:
    tokens_before, cached_before = DECODE_OUTPUT_TOKENS._value.get(), DECODE_CACHED_TOKENS._value.get()
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill, sampling=Sampling(top_logprobs=1))
        top = [common_pb2.TokenLogprob(token_id=42, logprob=-0.5)]
        logprobs = common_pb2.PositionLogprobs(logprob=-0.5, top=top)
        call.first_token(worker_cached_tokens=64, store_cached_tokens=64, logprobs=logprobs)
        request = gateway.requests[1]
        await gateway.until(lambda: request.tokens)
        assert (request.tokens, request.logprobs, request.cached_tokens) == ([42], [logprobs], 128)
        assert (request.ended, rank_of(running).steps) == (False, 0)
    assert DECODE_OUTPUT_TOKENS._value.get() - tokens_before == 1
    assert DECODE_CACHED_TOKENS._value.get() - cached_before == 128


async def test_a_first_token_that_comes_while_the_stream_is_broken_is_kept() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        await gateway.break_stream()
        call.first_token()
        await eventually(lambda: bool(rank_of(running).first_tokens))
        await gateway.attach()
        await gateway.until(lambda: gateway.requests[1].tokens == [42])


async def test_a_prompt_that_the_rank_computes_after_all_is_sent_nowhere() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        key = await submitted(running, gateway, prefill)
        rank.emit(rank.step(rank.output(key, 10, "length")))
        assert (await gateway.ended(1)).error is None
        assert not prefill.calls


async def test_a_prompt_computed_here_asks_the_store_itself() -> None:
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        rank = rank_of(running)
        await gateway.submit(PROMPT, 10, store=targets_pb2.StoreTarget(store_id="store-1", blocks=2))
        await eventually(lambda: bool(rank.submitted))
        fetch = rank.submitted[0].fetch
        assert fetch is not None
        assert (rank.submitted[0].remote_prefill, fetch.store_id, fetch.blocks) == (False, "store-1", 2)
        rank.emit(rank.step(rank.output(0, 10, "length")))
        await gateway.ended(1)


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


async def test_a_prefill_worker_that_is_not_there_has_the_request_placed_again() -> None:
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        nobody = FakePrefill()
        nobody.endpoint = f"127.0.0.1:{free_port()}"
        key = await submitted(running, gateway, nobody)
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


async def test_a_prefill_worker_that_dies_when_its_work_is_done_disturbs_nobody() -> None:
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
async def test_kv_that_did_not_land_has_the_request_placed_again_after_its_first_token(says_done: bool) -> None:
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
async def test_a_first_token_with_other_log_probabilities_than_asked_for_is_a_mistake(alternatives: int | None) -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill, sampling=Sampling(top_logprobs=2))
        top = [common_pb2.TokenLogprob(token_id=number, logprob=-0.5) for number in range(alternatives or 0)]
        call.first_token(logprobs=None if alternatives is None else common_pb2.PositionLogprobs(logprob=-0.5, top=top))
        await gateway.ended(1)
        lost(gateway)
        assert not rank_of(running).first_tokens


async def test_a_second_first_token_is_a_mistake_and_does_not_reach_the_rank() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        call.first_token(42)
        call.first_token(43)
        await gateway.ended(1)
        lost(gateway)
        assert [first.token_id for first in rank_of(running).first_tokens] == gateway.requests[1].tokens == [42]
        await eventually(lambda: call.cancelled)


async def test_a_mistake_in_the_call_ends_its_request_at_once_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_a_request_that_ends_with_its_first_token_needs_no_more_of_its_prompt(
    stop: decode_pb2.StopConditions, finish: int
) -> None:
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


async def test_a_request_that_ignores_ends_of_sequences_goes_on_behind_one() -> None:
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


async def test_a_call_ends_when_no_scheduler_lists_its_worker_any_more() -> None:
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
async def test_a_prompt_that_was_sent_is_lost_with_its_worker_unless_it_has_landed(landed: bool) -> None:
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


async def test_a_gateway_that_hangs_up_for_good_ends_its_calls() -> None:
    async with decode_without_rank(grace_seconds=0.1) as running, fake_prefill() as prefill:
        async with gateway_client(running.endpoint) as gateway:
            call = await called(running, gateway, prefill)
        await eventually(lambda: call.cancelled)
        assert rank_of(running).cancelled == [0]


async def test_the_death_of_the_rank_ends_its_prefill_calls_and_its_requests() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        rank_of(running).die()
        assert isinstance((await gateway.ended(1)).error, EngineFailed)
        await eventually(lambda: call.cancelled)


async def test_one_channel_serves_all_prompts_of_one_worker() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        calls = [await called(running, gateway, prefill) for _ in range(3)]
        assert len({call.peer for call in calls}) == 1
        for stream_id, call in enumerate(calls, 1):
            call.end(WorkerFull("full"))
            await gateway.ended(stream_id)


async def test_channels_of_workers_that_are_gone_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_link, "MAX_IDLE_CHANNELS", 1)
    async with decode_without_rank() as running, gateway_client(running.endpoint) as gateway:
        peers = []
        for stream_id in range(1, 4):
            async with fake_prefill() as prefill:
                call = await called(running, gateway, prefill, make_ticket(len(PROMPT), name=stream_id))
                call.end(WorkerFull("full"))
                await gateway.ended(stream_id)
                peers.append(call.peer)
        assert running.prefill_link.open_channels == 1


async def test_a_worker_that_computes_no_prompts_sends_those_without_a_prefill_worker_back() -> None:
    async with (
        decode_without_rank(can_prefill=False, engine={"transfer": {}}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        assert not gateway.welcome.identity.can_prefill
        await gateway.submit(PROMPT, 10)
        assert type((await gateway.ended(1)).error) is PlaceAgain


async def test_blocks_of_the_landing_are_those_after_the_ones_held() -> None:
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        key = await submitted(running, gateway, prefill)
        landing = make_ticket(len(PROMPT), held_blocks=2)
        rank_of(running).open_landing(key, landing, held_blocks=2)
        call = await prefill.call()
        blocks = sum(segment.block_count for segment in call.request.ticket.segments)
        assert (call.request.held_blocks, blocks) == (2, -(-len(PROMPT) // BLOCK_TOKENS) - 2)
        call.end(WorkerFull("full"))
        await gateway.ended(1)
