"""`python -m decode_svc` as a process: how it ends, and that its rank never outlives it."""

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from deepmesh.v1 import common_pb2

from mesh.errors import EngineFailed, ShuttingDown, WorkerDraining
from mesh.rpc.channel import Channels
from tests.support.decode_server import gateway_client
from tests.support.scheduler_server import running_scheduler
from tests.support.waiting import eventually
from tests.support.worker_process import WorkerProcess, worker_process

PROMPT = list(range(100))


@asynccontextmanager
async def decode_process(*settings: str, port: int | None = None) -> AsyncIterator[WorkerProcess]:
    """An oracle worker of 5 ms a step."""
    async with worker_process(
        "decode_svc", "engine.oracle.step_ms=5", "grace_seconds=1", *settings, port=port
    ) as process:
        yield process


async def test_a_worker_told_to_stop_only_finishes_its_requests() -> None:
    async with running_scheduler() as scheduler, decode_process(f"scheduler={scheduler}") as process:
        await process.child.wait_ready(process.endpoint, Channels(), 90)
        rank = process.rank
        async with gateway_client(process.endpoint) as gateway:
            running = await gateway.submit(PROMPT, 100)
            await gateway.until(lambda: gateway.requests[running].tokens)
            process.signal(signal.SIGTERM)
            await eventually(lambda: any("worker stops" in line for line in process.lines))
            late = await gateway.ended(await gateway.submit(PROMPT, 5))
            assert isinstance(late.error, WorkerDraining)
            # Not acknowledged: the worker may have ended the stream by then.
            request = gateway.requests[running]
            await gateway.until(lambda: request.ended)
            assert request.finished == common_pb2.FINISH_REASON_LENGTH
            assert request.is_exact()
            assert isinstance(await gateway.stream_error(), ShuttingDown)
        assert await process.child.wait() == 0
        assert not rank.is_running()


async def test_a_request_longer_than_the_drain_is_sent_elsewhere() -> None:
    async with decode_process("server.drain_seconds=0.2") as process:
        await process.child.wait_ready(process.endpoint, Channels(), 90)
        async with gateway_client(process.endpoint) as gateway:
            stream_id = await gateway.submit(PROMPT, 10_000)
            await gateway.until(lambda: gateway.requests[stream_id].tokens)
            process.signal(signal.SIGTERM)
            request = gateway.requests[stream_id]
            await gateway.until(lambda: request.ended)
            assert isinstance(request.error, WorkerDraining)
            assert request.is_exact()
        assert await process.child.wait() == 0


async def test_the_death_of_the_rank_ends_the_process() -> None:
    async with decode_process() as process:
        await process.child.wait_ready(process.endpoint, Channels(), 90)
        async with gateway_client(process.endpoint) as gateway:
            stream_ids = [await gateway.submit([*PROMPT, number], 10_000) for number in range(10)]
            await gateway.until(lambda: all(gateway.requests[stream_id].tokens for stream_id in stream_ids))
            process.rank.kill()
            for request in gateway.requests.values():
                await gateway.until(lambda request=request: request.ended)
                assert isinstance(request.error, EngineFailed)
                assert request.is_exact()
        assert await process.child.wait() == 1
        assert "the engine process ended with signal SIGKILL" in process.lines[-1]


async def test_a_killed_worker_leaves_no_rank() -> None:
    async with decode_process() as process:
        await process.ends_with_its_rank_when_killed()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("colour=red",), "colour"),
        (("engine.backend=model",), "engine.model_dir is required"),
        (("can_prefill=false",), "engine.transfer is required"),
        (("stores=[localhost:1]",), "engine.transfer is required"),
    ],
)
async def test_a_worker_that_cannot_start_says_why(settings: tuple[str, ...], complaint: str) -> None:
    async with decode_process(*settings) as process:
        await process.ends_for_good_complaining_of(complaint)


async def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    async with running_scheduler() as taken, decode_process(port=int(taken.rpartition(":")[2])) as process:
        await process.ends_for_good_complaining_of(taken)
