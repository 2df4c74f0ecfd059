"""KV events of a real worker over loopback gRPC."""

import asyncio
import json
import random
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from deepmesh.v1 import kv_events_pb2, kv_events_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from engine.protocol.messages import StepResult
from mesh.blocks import chain_hashes, root_hash
from mesh.domain.workers import WorkerLoad
from mesh.errors import ConfigError, MeshError, Overloaded, SlowClient
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from tests.support.decode_server import VOCABULARY_SIZE, gateway_client, running_worker
from tests.support.kv_events import Mirror, events_of, served_events
from tests.support.waiting import eventually
from tests.support.worker_process import worker_process
from worker.events.config import KvEventsConfig
from worker.events.service import KvEventsServicer

EXAMPLE = Path(__file__).parents[3] / "examples/python/kv_events.py"
TOLD = {"enabled": True, "kept_blocks": 64}


def prompt(blocks: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY_SIZE), k=64 * blocks + 1)


@asynccontextmanager
async def told_worker(**events: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A gateway's client of a worker with an oracle rank, and a stub of its events."""
    settings = {**TOLD, **events}
    async with (
        running_worker(kv_events=settings) as running,
        gateway_client(running.endpoint) as gateway,
        events_of(running.worker.host, KvEventsServicer(KvEventsConfig(**settings))) as (stub, _),
    ):
        yield gateway, stub


def subscribe(stub: Any, incarnation: str = "", from_sequence: int = 0) -> AsyncIterator[Any]:
    request = kv_events_pb2.SubscribeRequest(incarnation=incarnation, from_sequence=from_sequence)
    return stub.Subscribe(request).__aiter__()


async def failure(call: AsyncIterator[Any]) -> Exception:
    with pytest.raises((grpc.aio.AioRpcError, MeshError)) as raised:
        while True:
            await anext(call)
    error = raised.value
    return from_rpc_error(error) if isinstance(error, grpc.aio.AioRpcError) else error


async def accepted(stub: Any) -> bool:
    """Whether a further subscriber is told anything."""
    call = stub.Subscribe(kv_events_pb2.SubscribeRequest())
    try:
        return await call.read() is not grpc.aio.EOF
    except (grpc.aio.AioRpcError, MeshError):
        return False
    finally:
        call.cancel()


async def run(gateway: Any, token_ids: list[int], tokens: int = 1) -> list[int]:
    """The prompt and the answer."""
    stream_id = await gateway.submit(token_ids, tokens)
    request = await gateway.ended(stream_id)
    return [*token_ids, *request.tokens]


async def test_blocks_of_prompts_and_answers_are_told_with_their_tokens() -> None:
    async with told_worker() as (gateway, stub):
        mirror, call = Mirror(), subscribe(stub)
        mirror.apply(await anext(call))
        assert (mirror.snapshots, mirror.more, mirror.held) == (1, False, {})
        text = await run(gateway, prompt(3, seed=1), tokens=130)
        # The last token's KV is not computed.
        hashes = chain_hashes(text[:-1])
        await mirror.follow(call, hashes)
        assert mirror.not_empty() == {(0, "GPU"): set(hashes)}
        assert [mirror.parents[content] for content in hashes] == [b"", *hashes[:-1]]
        assert [token for content in hashes for token in mirror.tokens[content]] == text[: 64 * len(hashes)]
        assert {mirror.roots[content] for content in hashes} == {root_hash(b"")}


async def test_a_subscriber_that_comes_back_gets_what_it_missed() -> None:
    async with told_worker() as (gateway, stub):
        mirror = Mirror()
        first, second = prompt(2, seed=1), prompt(3, seed=2)
        await run(gateway, first)
        await mirror.follow(subscribe(stub), chain_hashes(first))
        await run(gateway, second)
        snapshots = mirror.snapshots
        await mirror.follow(subscribe(stub, mirror.incarnation, mirror.sequence + 1), chain_hashes(second))
        assert mirror.snapshots == snapshots
        assert mirror.not_empty() == {(0, "GPU"): set(chain_hashes(first) + chain_hashes(second))}


@pytest.mark.parametrize("incarnation", [None, "another"])
async def test_a_gap_no_longer_kept_ends_in_a_snapshot(incarnation: str | None) -> None:
    async with told_worker(kept_blocks=4) as (gateway, stub):
        mirror, prompts = Mirror(), [prompt(3, seed) for seed in range(5)]
        await run(gateway, prompts[0])
        await mirror.follow(subscribe(stub), chain_hashes(prompts[0]))
        for each in prompts[1:]:
            await run(gateway, each)
        snapshots = mirror.snapshots
        call = subscribe(stub, incarnation or mirror.incarnation, mirror.sequence + 1)
        await mirror.follow(call, (content for each in prompts for content in chain_hashes(each)))
        assert mirror.snapshots == snapshots + 1


async def test_a_subscriber_that_reads_nothing_is_ended() -> None:
    settings = KvEventsConfig(enabled=True, max_subscribers=1)
    async with (
        running_worker(kv_events=settings.model_dump()) as running,
        events_of(running.worker.host, KvEventsServicer(settings, stuck_seconds=0.2)) as (stub, other),
    ):
        events = running.worker.host.events
        assert events is not None
        stuck = subscribe(stub)
        await anext(stuck)

        async def place_is_free() -> bool:
            # In time more than gRPC's buffers hold, some hundred KiB on either side; each time less than is kept.
            for _ in range(20):
                blocks = [secrets.token_bytes(16) for _ in range(500)]
                parents = [b"", *blocks[:-1]]
                events.observe(0, StepResult(0, [], WorkerLoad(), stored_blocks=blocks, stored_parents=parents))
                events.observe(0, StepResult(0, [], WorkerLoad(), removed_blocks=blocks))
            return await accepted(other)

        await eventually(place_is_free)
        assert isinstance(await failure(stuck), SlowClient)


async def test_more_subscribers_than_allowed_are_refused() -> None:
    async with told_worker(max_subscribers=2) as (_, stub):
        calls = [stub.Subscribe(kv_events_pb2.SubscribeRequest()) for _ in range(2)]
        for call in calls:
            await call.read()
        assert isinstance(await failure(subscribe(stub)), Overloaded)
        calls[0].cancel()

        async def place_is_free() -> bool:
            return await accepted(stub)

        await eventually(place_is_free)


async def test_without_the_setting_it_says_which_to_set() -> None:
    silent = KvEventsServicer(KvEventsConfig())
    async with running_worker() as running, events_of(running.worker.host, silent) as (stub, _):
        error = await failure(subscribe(stub))
        assert isinstance(error, ConfigError) and "kv_events.enabled=true" in str(error)


async def test_the_example_prints_events_in_vllms_terms() -> None:
    async with running_worker(kv_events=TOLD) as running, gateway_client(running.endpoint) as gateway:
        servicer = KvEventsServicer(KvEventsConfig.model_validate(TOLD))
        async with served_events(running.worker.host, servicer) as endpoint:
            text = prompt(2, seed=1)
            await run(gateway, text)
            events = running.worker.host.events
            assert events is not None
            await eventually(lambda: events.log.last > 0)
            # A snapshot of three parts: cleared, the pool, and the end.
            command = (sys.executable, EXAMPLE, endpoint, "--batches", "3")
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            printed, _ = await process.communicate()
    cleared, stored = [json.loads(line) for line in printed.splitlines()]
    assert cleared["type"] == "AllBlocksCleared" and stored["type"] == "BlockStored"
    assert stored["block_hashes"] == [content.hex() for content in chain_hashes(text)]
    assert stored["parent_block_hash"] is None and stored["token_ids"] == text[:128]
    assert (stored["block_size"], stored["medium"], stored["worker"]) == (64, "GPU", "decode-1")


async def test_a_worker_process_lists_its_service_by_reflection() -> None:
    async with worker_process("decode_svc", "kv_events.enabled=true") as process:
        await process.child.wait_ready(process.endpoint, Channels(), 90)

        def listed() -> list[str]:
            with grpc.insecure_channel(process.endpoint) as channel:
                return list(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert "deepmesh.v1.KvEventsService" in await asyncio.to_thread(listed)
        async with Channels().open(process.endpoint) as channel:
            stub = kv_events_pb2_grpc.KvEventsServiceStub(channel)
            batch = await anext(subscribe(stub))
            assert batch.snapshot and not batch.more and batch.model == "oracle" and batch.incarnation
