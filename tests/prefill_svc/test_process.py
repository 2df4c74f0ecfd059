"""`python -m prefill_svc` as a process: how it ends, and that its rank never outlives it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from deepmesh.internal.v1 import scheduler_pb2, targets_pb2, workers_pb2

from mesh.errors import EngineFailed, WorkerDraining
from mesh.rpc.channel import Channels
from tests.support.decode_server import gateway_client, running_worker
from tests.support.prefilling import ORACLE_READY, make_ticket, prefill_caller, prefill_request
from tests.support.scheduler_server import running_scheduler, scheduler_stub
from tests.support.waiting import eventually
from tests.support.worker_process import WorkerProcess, worker_process

PROMPT = list(range(300))
# One prompt takes a while.
SLOW = "engine.oracle.prefill_tokens_per_second=200"


@asynccontextmanager
async def prefill_process(*settings: str) -> AsyncIterator[WorkerProcess]:
    async with worker_process("prefill_svc", "engine.transfer={}", *settings) as process:
        yield process


def target(process: WorkerProcess) -> targets_pb2.WorkerTarget:
    return targets_pb2.WorkerTarget(worker_id="prefill-1", endpoint=process.endpoint)


async def test_a_worker_told_to_stop_only_finishes_its_requests() -> None:
    async with (
        running_worker(engine={"transfer": {}}) as decode,
        prefill_process(SLOW) as process,
        gateway_client(decode.endpoint) as gateway,
    ):
        await process.child.wait_ready(process.endpoint, Channels(), 90)
        rank = process.rank
        stream_id = await gateway.submit(PROMPT, 10, prefill=target(process))
        await eventually(lambda: decode.worker.host.report.transfers.open_landings == 1)
        await asyncio.sleep(0.05)
        process.signal(signal.SIGTERM)
        await eventually(lambda: any("worker stops" in line for line in process.lines))
        async with prefill_caller(process.endpoint) as late:
            late.start(prefill_request(PROMPT, make_ticket(300, ready=ORACLE_READY)))
            assert isinstance(await late.ended(), WorkerDraining)
        assert (await gateway.ended(stream_id)).is_exact()
        assert await process.child.wait() == 0
        assert not rank.is_running()


async def test_the_scheduler_knows_a_prefill_worker_by_its_role() -> None:
    async with (
        running_scheduler() as scheduler,
        scheduler_stub(scheduler) as stub,
        prefill_process(f"scheduler={scheduler}", "worker_id=prefill-7") as process,
    ):
        await process.child.wait_ready(process.endpoint, Channels(), 90)
        watch = stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        workers: list[scheduler_pb2.WorkerStatus] = []
        while not workers:
            workers = list((await watch.read()).workers)
        identity = workers[0].identity
        assert (identity.worker_id, identity.endpoint) == ("prefill-7", process.endpoint)
        assert identity.role == workers_pb2.WORKER_ROLE_PREFILL
        watch.cancel()


async def test_the_death_of_the_rank_ends_calls_and_process() -> None:
    async with prefill_process(SLOW) as process:
        await process.child.wait_ready(process.endpoint, Channels(), 90)
        async with prefill_caller(process.endpoint) as caller:
            caller.start(prefill_request(PROMPT, make_ticket(300, ready=ORACLE_READY)))
            assert (await caller.next()).WhichOneof("message") == "accepted"
            process.rank.kill()
            assert isinstance(await caller.ended(), EngineFailed)
        assert await process.child.wait() == 1
        assert "the engine process ended with signal SIGKILL" in process.lines[-1]


async def test_a_killed_worker_leaves_no_rank() -> None:
    async with prefill_process() as process:
        await process.ends_with_its_rank_when_killed()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (("colour=red",), "colour"),
        (("engine.transfer=null",), "engine.transfer is required"),
    ],
)
async def test_a_worker_that_cannot_start_says_why(settings: tuple[str, ...], complaint: str) -> None:
    async with prefill_process(*settings) as process:
        await process.ends_for_good_complaining_of(complaint)
