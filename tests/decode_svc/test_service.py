"""DecodeService over loopback gRPC, with an oracle rank in a process of its own."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc, targets_pb2, workers_pb2
from deepmesh.v1 import common_pb2

from mesh.domain.sampling import Sampling
from mesh.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    StreamReplaced,
    UnknownRequest,
    WorkerFull,
)
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from tests.support.decode_server import TOTAL_BLOCKS, VOCABULARY_SIZE, GatewayClient, gateway_client, running_worker
from tests.support.waiting import eventually

SLOW = {"oracle": {"step_ms": 2}}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY_SIZE), k=length)


@pytest.mark.parametrize("next_n", [0, 3])
async def test_hundreds_of_requests_of_two_gateways_get_exactly_their_tokens(next_n: int) -> None:
    async with (
        running_worker(engine={"drafts": {"next_n": next_n}}) as running,
        gateway_client(running.endpoint, "a") as first,
        gateway_client(running.endpoint, "b") as second,
    ):
        random_numbers = random.Random(1)
        for number in range(200):
            for gateway in (first, second):
                shared = prompt(number % 3 * 64)
                sampling = Sampling(temperature=number % 2, seed=number)
                length = random_numbers.randint(1, 200)
                await gateway.submit([*shared, *prompt(length, number)], random_numbers.randint(1, 80), sampling)
        for gateway in (first, second):
            for stream_id in range(1, 201):
                request = await gateway.ended(stream_id)
                assert request.finished == common_pb2.FINISH_REASON_LENGTH
                assert request.cached_tokens is not None
                assert request.is_exact()
        assert any(request.cached_tokens for request in first.requests.values())


async def test_the_welcome_says_who_the_worker_is() -> None:
    async with running_worker() as running, gateway_client(running.endpoint) as gateway:
        identity = gateway.welcome.identity
        assert (identity.worker_id, identity.endpoint, identity.model) == ("decode-1", running.endpoint, "oracle")
        assert (identity.role, identity.can_prefill) == (workers_pb2.WORKER_ROLE_DECODE, True)
        assert identity.vocabulary_size == VOCABULARY_SIZE
        assert gateway.welcome.grace_ms == 1000


async def test_log_probabilities_come_one_for_each_token() -> None:
    async with running_worker() as running, gateway_client(running.endpoint) as gateway:
        request = await gateway.ended(await gateway.submit(prompt(10), 20, Sampling(top_logprobs=3)))
        assert len(request.tokens) == len(request.logprobs) == 20
        for token_id, position in zip(request.tokens, request.logprobs, strict=True):
            assert [len(position.top), position.top[0].token_id] == [3, token_id]
            assert position.logprob == pytest.approx(position.top[0].logprob)


async def test_a_stop_token_ends_the_request_and_is_reported() -> None:
    async with running_worker() as running, gateway_client(running.endpoint) as gateway:
        whole = await gateway.ended(await gateway.submit(prompt(10), 50))
        stop = decode_pb2.StopConditions(max_tokens=50, token_ids=[whole.tokens[20]])
        request = await gateway.ended(await gateway.submit(prompt(10), 50, stop=stop))
        assert request.finished == common_pb2.FINISH_REASON_STOP
        assert request.tokens == whole.tokens[: whole.tokens.index(whole.tokens[20]) + 1]


async def test_a_cancelled_request_ends_and_frees_its_blocks() -> None:
    async with (
        running_worker(engine={"oracle": {"step_ms": 5}}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        stream_id = await gateway.submit(prompt(100), 10_000)
        await gateway.until(lambda: gateway.requests[stream_id].tokens)
        await gateway.send(cancellation=decode_pb2.Cancellation(stream_id=stream_id))
        request = await gateway.ended(stream_id)
        assert request.finished == common_pb2.FINISH_REASON_CANCELLED
        assert request.is_exact()


async def test_a_broken_stream_loses_and_repeats_no_token() -> None:
    async with (
        running_worker(engine=SLOW, grace_seconds=15) as running,
        gateway_client(running.endpoint, "a") as gateway,
        gateway_client(running.endpoint, "b") as undisturbed,
    ):
        stream_ids = [await gateway.submit(prompt(50, number), 300) for number in range(20)]
        other = await undisturbed.submit(prompt(50), 300)
        for tokens in (20, 100, 200):
            await gateway.until(lambda tokens=tokens: len(gateway.requests[1].tokens) >= tokens)
            await gateway.break_stream()
            await asyncio.sleep(0.05)
            await gateway.attach()
        for stream_id in stream_ids:
            request = await gateway.ended(stream_id)
            assert len(request.tokens) == 300
            assert request.is_exact()
        assert (await undisturbed.ended(other)).is_exact()


async def test_requests_end_with_the_grace_of_their_gateway() -> None:
    async with running_worker(engine=SLOW, grace_seconds=0.2) as running:
        async with gateway_client(running.endpoint) as gateway:
            stream_id = await gateway.submit(prompt(50), 1500)
            await gateway.until(lambda: gateway.requests[stream_id].tokens)
        await running.until_empty()
        async with gateway_client(running.endpoint) as late:
            late.requests = gateway.requests
            await late.break_stream()
            await late.attach()
            assert isinstance((await late.ended(stream_id)).error, UnknownRequest)


async def test_a_restarted_gateway_cancels_what_it_ran_before() -> None:
    async with running_worker(engine=SLOW, grace_seconds=60) as running:
        async with gateway_client(running.endpoint, incarnation="old") as old:
            stream_id = await old.submit(prompt(50), 1500)
            await old.until(lambda: old.requests[stream_id].tokens)
        # Until the worker has seen the old stream end, the new gateway would be another one with its id.
        await eventually(lambda: not running.worker.sessions.attached_gateways)
        async with gateway_client(running.endpoint, incarnation="new"):
            await running.until_empty()


async def test_a_second_stream_of_a_gateway_ends_the_first() -> None:
    async with (
        running_worker() as running,
        gateway_client(running.endpoint) as first,
        gateway_client(running.endpoint) as second,
    ):
        assert isinstance(await first.stream_error(), StreamReplaced)
        assert (await second.ended(await second.submit(prompt(5), 5))).is_exact()


async def test_a_deadline_ends_the_request() -> None:
    async with (
        running_worker(engine={"oracle": {"step_ms": 5}}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        # The first one may be over before a busy machine has given it a token.
        for deadline_ms in (200, 1000, 5000, 20_000):
            request = await gateway.ended(await gateway.submit(prompt(10), 10_000, deadline_ms=deadline_ms))
            assert isinstance(request.error, DeadlineExceeded)
            if request.tokens:
                break
        assert 0 < len(request.tokens) < deadline_ms / 2
        at_once = await gateway.ended(await gateway.submit(prompt(10), 10_000, deadline_ms=1))
        assert isinstance(at_once.error, DeadlineExceeded)


async def test_bad_submissions_fail_alone() -> None:
    bad: list[tuple[dict[str, Any], type[MeshError], str]] = [
        ({"prompt": []}, InvalidRequest, "token_ids"),
        ({"prompt": [VOCABULARY_SIZE]}, InvalidRequest, "token_ids"),
        ({"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"max_tokens": TOTAL_BLOCKS * 64}, ContextExceeded, "max_tokens"),
        ({"sampling_message": common_pb2.SamplingParams(temperature=-1)}, InvalidRequest, "temperature"),
        ({"sampling_message": common_pb2.SamplingParams(top_logprobs=21)}, InvalidRequest, "top_logprobs"),
        ({"prefill": targets_pb2.WorkerTarget(worker_id="p")}, InvalidRequest, "prefill"),
    ]
    async with running_worker() as running, gateway_client(running.endpoint) as gateway:
        for changes, expected, field in bad:
            request = await gateway.ended(await gateway.submit(**{"prompt": prompt(10), "max_tokens": 5, **changes}))
            assert type(request.error) is expected
            assert request.error is not None
            assert request.error.metadata["field"] == field
            assert (await gateway.ended(await gateway.submit(prompt(10), 5))).is_exact()


async def test_a_full_queue_sends_requests_elsewhere() -> None:
    async with (
        running_worker(engine={"max_requests": 1, "oracle": {"step_ms": 2}}, queue={"waiting_requests": 1}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        taken = [await gateway.submit(prompt(10, number), 10_000) for number in range(2)]
        for number in range(2):
            refused = await gateway.ended(await gateway.submit(prompt(10, number), 30))
            assert isinstance(refused.error, WorkerFull)
        for stream_id in taken:
            await gateway.until(lambda request=gateway.requests[stream_id]: request.tokens)
            await gateway.send(cancellation=decode_pb2.Cancellation(stream_id=stream_id))
            request = await gateway.ended(stream_id)
            assert request.error is None and request.is_exact()


async def test_a_gateway_that_never_reads_stalls_nobody_and_loses_nothing() -> None:
    async with (
        running_worker() as running,
        gateway_client(running.endpoint, "busy") as busy,
        Channels().open(running.endpoint) as channel,
    ):
        lazy = await GatewayClient(channel, "lazy", "i").attach(reading=False)
        for number in range(40):
            await lazy.submit(prompt(10, number), 1500)
        for stream_id in [await busy.submit(prompt(20, number), 100) for number in range(20)]:
            assert (await busy.ended(stream_id)).is_exact()
        await eventually(lambda: running.worker.sessions.live_requests == 0)
        await lazy.attach()
        for stream_id, request in lazy.requests.items():
            assert len((await lazy.ended(stream_id)).tokens) == 1500
            assert request.is_exact()
        # What had piled up came in few frames, not in one a step.
        assert lazy.frames < 20


async def test_streams_out_of_order_are_refused() -> None:
    hello = decode_pb2.AttachHello(gateway_id="g", gateway_incarnation="i")
    streams: list[list[dict[str, Any]]] = [
        [{"cancellation": decode_pb2.Cancellation(stream_id=1)}],
        [{"hello": decode_pb2.AttachHello(gateway_incarnation="i")}],
        [{"hello": hello}, {"hello": hello}],
    ]
    async with running_worker() as running, Channels().open(running.endpoint) as channel:
        for messages in streams:
            call = decode_pb2_grpc.DecodeServiceStub(channel).Attach()
            for message in messages:
                await call.write(decode_pb2.AttachRequest(**message))
            assert isinstance(await ended_with(call), InvalidRequest)


async def test_a_stream_id_used_twice_ends_the_stream() -> None:
    async with (
        running_worker(engine=SLOW, grace_seconds=15) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        stream_id = await gateway.submit(prompt(10), 100)
        submission = decode_pb2.Submission(
            stream_id=stream_id, token_ids=[1], stop=decode_pb2.StopConditions(max_tokens=1)
        )
        await gateway.send(submission=submission)
        assert isinstance(await gateway.stream_error(), InvalidRequest)
        await gateway.attach()
        assert (await gateway.ended(stream_id)).is_exact()


async def test_garbage_on_the_wire_ends_its_stream_alone() -> None:
    async with (
        running_worker() as running,
        gateway_client(running.endpoint) as gateway,
        Channels().open(running.endpoint) as channel,
    ):
        call: Any = channel.stream_stream("/deepmesh.internal.v1.DecodeService/Attach")()
        await call.write(b"\xff\xff\xff\xff not a message")
        with pytest.raises(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert (await gateway.ended(await gateway.submit(prompt(10), 5))).is_exact()


async def ended_with(call: Any) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return from_rpc_error(caught.value)
