"""One of a decode worker's ranks is killed or frozen, whatever it does: the worker ends, and says why."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import psutil
import pytest

from mesh.domain.workers import WorkerState
from mesh.errors import EngineFailed
from tests.support.decode_server import GatewayClient, RunningWorker, gateway_client, running_worker
from tests.support.prefilling import running_prefill
from tests.support.waiting import eventually
from worker.ranks import group as rank_group
from worker.watchdog import END_SECONDS

RANKS = 2
# Two prompts of 300 tokens take twenty seconds, in steps of two that a prefill worker ends before it stops.
SLOW_PREFILL = {"max_step_tokens": 64, "oracle": {"prefill_tokens_per_second": 32}}
REASONS = {
    signal.SIGKILL: "rank 1 of 2 ended with signal SIGKILL",
    signal.SIGSTOP: "rank 1 of 2 has made no progress for 2 s: its process does not run",
}


def struck_with(always: signal.Signals, other: signal.Signals) -> pytest.MarkDecorator:
    """Each fault; `other` is left to `make check-ranks`."""
    parameters = [pytest.param(always), pytest.param(other, marks=pytest.mark.check("ranks"))]
    return pytest.mark.parametrize("fault", parameters, ids=lambda fault: fault.name)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "STALLED_SECONDS", 1.0)
    monkeypatch.setattr(rank_group, "END_SECONDS", 2.0)


def prompt_of(length: int, seed: int) -> list[int]:
    return [(seed * 31 + number * number) % 1000 for number in range(length)]


async def assert_ends(running: RunningWorker, fault: signal.Signals) -> None:
    """Strike the second rank; the worker then ends for that reason, and leaves no process."""
    processes = [psutil.Process(rank.process_id) for rank in running.worker.host.ranks.ranks]
    processes[1].send_signal(fault)
    with pytest.raises(EngineFailed) as raised:
        await asyncio.shield(running.following)
    assert raised.value.message == REASONS[fault]
    await eventually(lambda: not any(process.is_running() for process in processes))
    assert running.worker.host.report.next_report(snapshot=True).state is WorkerState.DRAINING


async def assert_told_why(gateway: GatewayClient, streams: list[int], fault: signal.Signals) -> None:
    for stream_id in streams:
        error = (await gateway.ended(stream_id)).error
        assert isinstance(error, EngineFailed)
        assert error.message == REASONS[fault]


@struck_with(signal.SIGSTOP, signal.SIGKILL)
async def test_at_rest(fault: signal.Signals) -> None:
    async with running_worker(ranks=RANKS) as running:
        await assert_ends(running, fault)


@struck_with(signal.SIGKILL, signal.SIGSTOP)
async def test_in_a_step(fault: signal.Signals) -> None:
    async with (
        running_worker(ranks=RANKS, engine={"oracle": {"step_ms": 5}}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        streams = [await gateway.submit(prompt_of(50, seed), 10_000) for seed in range(4)]
        await gateway.until(lambda: all(gateway.requests[stream_id].tokens for stream_id in streams))
        await assert_ends(running, fault)
        await assert_told_why(gateway, streams, fault)


@struck_with(signal.SIGKILL, signal.SIGSTOP)
async def test_in_a_landing(fault: signal.Signals) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running_prefill(engine=SLOW_PREFILL))
        running = await stack.enter_async_context(running_worker(ranks=RANKS, engine={"transfer": {}}))
        gateway = await stack.enter_async_context(gateway_client(running.endpoint))
        streams = [await gateway.submit(prompt_of(300, seed), 20, prefill=prefill.target) for seed in range(2)]
        await eventually(lambda: prefill.worker.live_requests == 2)
        await assert_ends(running, fault)
        await assert_told_why(gateway, streams, fault)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_tp_group_that_loses_a_rank_tells_requests(
    number: signal.Signals,
) -> None:
    engine = {"parallel": {"tp": 2}, "transfer": {}}
    async with (
        running_worker(engine=engine) as running,
        running_prefill(engine=SLOW_PREFILL) as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        ranks = running.worker.host.ranks
        streams = [await gateway.submit(prompt_of(300, seed), 20, prefill=prefill.target) for seed in range(3)]
        await eventually(lambda: ranks.transfers.open_landings > 0)
        os.kill(ranks.processes[1].process_id, number)
        errors = [(await gateway.ended(stream_id)).error for stream_id in streams]
        assert [type(error) for error in errors] == [EngineFailed] * 3
        assert len({str(error) for error in errors}) == 1 and "rank 1 of 2" in str(errors[0])
        await asyncio.gather(*(asyncio.shield(process.closed) for process in ranks.processes))


async def test_a_frozen_rank_is_reported_before_it_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "END_SECONDS", 60.0)
    async with running_worker(ranks=RANKS) as running:
        report, rank = running.worker.host.report, running.worker.host.ranks.ranks[1]
        os.kill(rank.process_id, signal.SIGSTOP)
        await eventually(lambda: report.next_report(snapshot=False).state is WorkerState.STALLED)
        os.kill(rank.process_id, signal.SIGCONT)
        await eventually(lambda: report.next_report(snapshot=False).state is WorkerState.SERVING)


def test_a_frozen_rank_ends_its_worker_within_five_seconds() -> None:
    # A heartbeat is written every quarter of a second, and looked at every 0.05 s.
    assert END_SECONDS + 0.25 + 0.05 < 5
