"""Prefill and decode workers together: real ranks on the oracle backend, real gRPC, real UCX."""

import asyncio
import random
from typing import Any

import pytest
from deepmesh.internal.v1 import decode_pb2
from deepmesh.v1 import common_pb2

from mesh.domain.sampling import Sampling
from mesh.errors import DeadlineExceeded, PrefillLost
from tests.support.decode_server import (
    VOCABULARY_SIZE,
    ReceivedOutput,
    RunningWorker,
    gateway_client,
    running_worker,
)
from tests.support.prefilling import running_prefill
from tests.support.waiting import eventually

# Segments of 128 blocks, and fewer slots than the longest prompts have segments: these wait for slots.
TIGHT = {"slot_bytes": 65536, "slots": 2, "landing_seconds": 60}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY_SIZE), k=length)


def decode(**engine: Any) -> Any:
    return running_worker(engine={"transfer": TIGHT, **engine})


def received_bytes(running: RunningWorker) -> int:
    """As last reported, perhaps after what it tells of."""
    return sum(running.worker.host.report.transfers.received_bytes.values())


def went_well(request: ReceivedOutput) -> bool:
    return request.error is None and request.is_exact()


async def until_slots_are_back(running: RunningWorker) -> None:
    def all_back() -> bool:
        transfers = running.worker.host.report.transfers
        return transfers.free_slots == transfers.total_slots and not transfers.open_landings

    await eventually(all_back)


async def test_prompts_of_any_length_computed_elsewhere_go_on_exactly() -> None:
    room = {"total_blocks": 700}
    async with (
        running_prefill(engine={"transfer": TIGHT, **room}) as prefill,
        decode(**room) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        lengths = [1, 2, 63, 64, 65, 127, 128, 129, 640, 128 * 64, 128 * 64 + 1, 20_000]
        for number, length in enumerate(lengths):
            sampling = Sampling(temperature=number % 2, seed=number, top_logprobs=2)
            await gateway.submit(prompt(length, number), 20, sampling, prefill=prefill.target)
        for stream_id in range(1, len(lengths) + 1):
            request = await gateway.ended(stream_id)
            assert went_well(request)
            assert len(request.logprobs) == 20
        await eventually(lambda: received_bytes(running) > 20_000 * 8)
        await until_slots_are_back(running)


@pytest.mark.parametrize(("prefill_slots", "decode_slots"), [(1 << 16, 1 << 20), (1 << 20, 1 << 16)])
async def test_segments_fit_the_smaller_slots_of_a_pair(prefill_slots: int, decode_slots: int) -> None:
    room = {"total_blocks": 400}
    async with (
        running_prefill(engine={"transfer": {**TIGHT, "slot_bytes": prefill_slots}, **room}) as prefill,
        running_worker(engine={"transfer": {**TIGHT, "slot_bytes": decode_slots}, **room}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        # Three segments of the smaller slots.
        assert went_well(await gateway.ended(await gateway.submit(prompt(20_000), 5, prefill=prefill.target)))
        await eventually(lambda: received_bytes(running) >= 20_000 * 8)
        await until_slots_are_back(running)


@pytest.mark.parametrize("layerwise_tokens", [64, 100_000])
async def test_two_prefill_and_two_decode_workers_serve_many_requests(layerwise_tokens: int) -> None:
    transfer = {**TIGHT, "layerwise_tokens": layerwise_tokens}
    engine = {"transfer": transfer}
    async with (
        running_prefill(engine=engine, worker_id="p1") as first,
        running_prefill(engine={**engine, "max_step_tokens": 128, "total_blocks": 300}, worker_id="p2") as second,
        running_worker(engine=engine) as one,
        running_worker(engine={**engine, "total_blocks": 256}) as other,
        gateway_client(one.endpoint) as gateway_one,
        gateway_client(other.endpoint) as gateway_other,
    ):
        random_numbers = random.Random(5)
        for number in range(40):
            for gateway in (gateway_one, gateway_other):
                where = {"prefill": random_numbers.choice([first, second]).target} if number % 4 else {}
                shared = prompt(number % 3 * 100)
                tokens = [*shared, *prompt(random_numbers.randint(1, 400), number)]
                await gateway.submit(tokens, random_numbers.randint(1, 40), Sampling(seed=number), **where)
        for gateway in (gateway_one, gateway_other):
            for stream_id in range(1, 41):
                request = await gateway.ended(stream_id)
                assert went_well(request)
                assert request.finished == common_pb2.FINISH_REASON_LENGTH
        for running in (one, other):
            await until_slots_are_back(running)


async def test_a_prefix_that_is_held_is_not_pushed_again() -> None:
    async with running_prefill() as prefill, decode() as running, gateway_client(running.endpoint) as gateway:
        shared = prompt(640)
        await gateway.ended(await gateway.submit([*shared, *prompt(100, 1)], 5, prefill=prefill.target))
        await eventually(lambda: received_bytes(running) > 0)
        before = received_bytes(running)
        request = await gateway.ended(await gateway.submit([*shared, *prompt(100, 2)], 5, prefill=prefill.target))
        assert went_well(request)
        await eventually(lambda: received_bytes(running) > before)
        assert received_bytes(running) - before == 2 * running.worker.host.ready.block_bytes
        assert request.cached_tokens == 640


async def test_a_prompt_that_the_decode_worker_holds_is_finished_there() -> None:
    async with running_prefill() as prefill, decode() as running, gateway_client(running.endpoint) as gateway:
        tokens = prompt(640)
        first = await gateway.ended(await gateway.submit(tokens, 5, prefill=prefill.target))
        # A report may come after what it tells of.
        await eventually(lambda: len(prefill.worker.host.report.transfers.sent_bytes) > 0)
        pushed = prefill.worker.host.report.transfers.sent_bytes
        again = await gateway.ended(await gateway.submit([*tokens, *first.tokens[:3]], 5, prefill=prefill.target))
        assert went_well(again)
        assert again.cached_tokens == 640
        await asyncio.sleep(0.1)
        assert prefill.worker.host.report.transfers.sent_bytes == pushed


async def test_kv_of_another_namespace_is_refused_and_never_mixed() -> None:
    other = {"oracle": {"vocabulary_size": 2000}}
    async with (
        running_prefill(engine=other) as prefill,
        decode() as running,
        gateway_client(running.endpoint) as gateway,
    ):
        request = await gateway.ended(await gateway.submit(prompt(300), 5, prefill=prefill.target))
        assert isinstance(request.error, PrefillLost)
        assert request.error.metadata == {"worker_id": "prefill-1"}
        assert "oracle-2000" in request.error.message
        assert not running.worker.host.report.transfers.received_bytes
        again = await gateway.ended(await gateway.submit(prompt(300), 5))
        assert went_well(again)


async def test_cancelling_at_any_stage_brings_everything_back() -> None:
    slow = {"oracle": {"prefill_tokens_per_second": 20_000, "step_ms": 1}}
    async with (
        running_prefill(engine=slow) as prefill,
        decode(**slow) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        random_numbers = random.Random(3)
        for number in range(60):
            await gateway.submit(prompt(random_numbers.randint(1, 2000), number), 50, prefill=prefill.target)
            await asyncio.sleep(random_numbers.random() * 0.02)
            cancelled = random_numbers.randint(1, number + 1)
            await gateway.send(cancellation=decode_pb2.Cancellation(stream_id=cancelled))
        for stream_id in range(1, 61):
            request = await gateway.ended(stream_id)
            assert went_well(request)
        await until_slots_are_back(running)


async def test_deadlines_during_the_push_bring_everything_back() -> None:
    slow = {"oracle": {"prefill_tokens_per_second": 5_000}}
    async with (
        running_prefill(engine=slow) as prefill,
        decode() as running,
        gateway_client(running.endpoint) as gateway,
    ):
        stream_ids = [
            await gateway.submit(prompt(1000, number), 10, prefill=prefill.target, deadline_ms=50 + 20 * number)
            for number in range(10)
        ]
        ended = [await gateway.ended(stream_id) for stream_id in stream_ids]
        assert any(isinstance(request.error, DeadlineExceeded) for request in ended)
        assert all(request.is_exact() for request in ended)
        await until_slots_are_back(running)


async def test_a_frozen_prefill_rank_is_lost_at_the_deadline() -> None:
    quick = {"transfer": {**TIGHT, "landing_seconds": 3}}
    async with (
        running_prefill() as prefill,
        running_worker(engine=quick) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        await gateway.ended(await gateway.submit(prompt(100), 5, prefill=prefill.target))
        prefill.rank.suspend()
        try:
            request = await gateway.ended(await gateway.submit(prompt(300, 1), 5, prefill=prefill.target))
            assert isinstance(request.error, PrefillLost)
            assert went_well(await gateway.ended(await gateway.submit(prompt(300, 1), 5)))
        finally:
            prefill.rank.resume()
        await until_slots_are_back(running)
        # A machine that is busy enough may take longer for one of them, too.
        for number in range(2, 7):
            request = await gateway.ended(await gateway.submit(prompt(300, number), 5, prefill=prefill.target))
            if not isinstance(request.error, PrefillLost):
                break
        assert went_well(request)


async def test_a_dead_prefill_rank_loses_only_its_prompts() -> None:
    slow = {"oracle": {"prefill_tokens_per_second": 1000}}
    async with decode() as running, gateway_client(running.endpoint) as gateway:
        async with running_prefill(engine=slow) as prefill:
            stream_ids = [await gateway.submit(prompt(1000, number), 5, prefill=prefill.target) for number in range(4)]
            await eventually(lambda: prefill.worker.live_requests == 4)
            prefill.rank.kill()
            ended = [await gateway.ended(stream_id) for stream_id in stream_ids]
        assert all(isinstance(request.error, PrefillLost) or request.is_exact() for request in ended)
        assert any(request.error for request in ended)
        assert went_well(await gateway.ended(await gateway.submit(prompt(1000), 5)))
        await until_slots_are_back(running)
