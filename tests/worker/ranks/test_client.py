"""The rank process over its real socket."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.config import EngineConfig
from engine.oracle.tokens import oracle_tokens
from engine.protocol.messages import Failed, StepResult
from mesh.config import ObserveConfig
from mesh.domain.sampling import Sampling
from mesh.domain.workers import PromptPace, WorkerSpeed
from mesh.errors import CheckpointError, ConfigError, EngineFailed, MeshError, NamespaceMismatch, RemoteError
from tests.support.engines import VOCABULARY, Transcript, oracle_config, prompt_of, submit_of
from tests.support.forking import forked_services
from tests.support.waiting import eventually, wait_until
from worker.ranks.client import RankClient, _start_error

RANK_OWNER = Path(__file__).parents[2] / "support" / "rank_owner.py"


@asynccontextmanager
async def rank(**settings: Any) -> AsyncIterator[RankClient]:
    with forked_services():
        client = await RankClient.start(oracle_config(**settings))
    try:
        yield client
    finally:
        await client.close(grace_seconds=30.0)


async def steps(client: RankClient) -> AsyncIterator[StepResult]:
    """The results of a rank that moves no KV."""
    async for result in client.results:
        assert isinstance(result, StepResult)
        yield result


async def read_until_ended(client: RankClient, transcript: Transcript, requests: int) -> None:
    if len(transcript.ends) == requests:
        return
    async for result in steps(client):
        transcript.record(result)
        if len(transcript.ends) == requests:
            return


def has_ended(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_children(before: set[psutil.Process]) -> set[psutil.Process]:
    while not (started := set(psutil.Process().children()) - before):
        time.sleep(0.005)
    return started


async def test_a_rank_says_what_it_serves() -> None:
    async with rank(total_blocks=10, max_requests=7, model_name="served-as") as client:
        ready = client.ready
        assert (ready.model, ready.vocabulary_size, ready.total_blocks) == ("served-as", VOCABULARY, 10)
        assert (ready.max_requests, ready.context_tokens) == (7, 640)
        assert 10_000_000 < ready.peak_bytes < 1_000_000_000


async def test_a_rank_says_how_fast_it_is() -> None:
    async with rank(max_requests=7, oracle={"step_ms": 5.0, "prefill_tokens_per_second": 800.0}) as client:
        assert client.ready.speed == WorkerSpeed(5.0, 7.0, PromptPace(800.0))


async def test_concurrent_requests_get_their_tokens() -> None:
    prompts = [prompt_of(length, seed=length) for length in range(1, 200, 3)]
    async with rank(total_blocks=200, max_requests=32) as client:
        for key, prompt in enumerate(prompts):
            client.submit(submit_of(key, prompt, 100, sampling=Sampling(top_logprobs=2)))
        transcript = Transcript()
        await read_until_ended(client, transcript, len(prompts))
    for key, prompt in enumerate(prompts):
        assert transcript.token_ids[key] == oracle_tokens(prompt, 100, VOCABULARY)
        assert len(transcript.logprobs[key]) == 100


async def test_a_cancelled_request_ends() -> None:
    async with rank(oracle={"step_ms": 5.0}) as client:
        client.submit(submit_of(1, prompt_of(10), 100_000))
        transcript = Transcript()
        transcript.record(await anext(steps(client)))
        client.cancel(1)
        await read_until_ended(client, transcript, 1)
        assert transcript.ends[1].finish == "cancelled"
        assert transcript.steps[-1].load.running_requests == 0


async def test_a_request_that_cannot_run_is_refused() -> None:
    async with rank(total_blocks=4) as client:
        client.submit(submit_of(1, [VOCABULARY], 5))
        client.submit(submit_of(2, [1], 5))
        transcript = Transcript()
        await read_until_ended(client, transcript, 2)
        assert transcript.ends[1].refusal is not None
        assert transcript.ends[2].finish == "length"


def _processor_seconds(process_id: int) -> float:
    """Seconds of all threads, to the nanosecond: cpu_times counts in ticks of 10 ms, one of which may just be full."""
    threads = Path(f"/proc/{process_id}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def test_an_idle_rank_uses_no_cpu() -> None:
    async with rank() as client:
        client.submit(submit_of(1, prompt_of(10), 5))
        await read_until_ended(client, Transcript(), 1)

        async def idle() -> bool:
            before = _processor_seconds(client.process_id)
            await asyncio.sleep(0.3)
            # Its heartbeat takes well under a millisecond.
            return _processor_seconds(client.process_id) - before < 0.003

        # It may still be at what follows its last result.
        await eventually(idle)


async def test_unread_results_pause_the_rank_and_nothing_is_lost() -> None:
    requests, tokens = 32, 800
    async with rank(max_requests=requests) as client:
        for key in range(requests):
            client.submit(submit_of(key, [key], tokens, sampling=Sampling(top_logprobs=20)))
        process = psutil.Process(client.process_id)
        await _until_paused(process)
        resident = process.memory_info().rss
        transcript = Transcript()
        transcript.record(await anext(steps(client)))
        assert not transcript.ends
        await read_until_ended(client, transcript, requests)
        assert resident < client.ready.peak_bytes + 40_000_000
    for key in range(requests):
        assert transcript.token_ids[key] == oracle_tokens([key], tokens, VOCABULARY)


async def _until_paused(process: psutil.Process) -> None:
    async def paused() -> bool:
        before = process.cpu_times()
        await asyncio.sleep(0.2)
        # On a busy machine it may only have waited for a processor.
        return process.cpu_times() == before and process.status() == psutil.STATUS_SLEEPING

    await eventually(paused)


async def test_a_killed_rank_is_noticed() -> None:
    async with rank(oracle={"step_ms": 5.0}) as client:
        client.submit(submit_of(1, prompt_of(10), 100_000))
        await anext(client.results)
        os.kill(client.process_id, signal.SIGKILL)
        async for _ in client.results:
            pass
        assert await asyncio.shield(client.closed) == -signal.SIGKILL
        with pytest.raises(EngineFailed):
            client.submit(submit_of(2, [1], 1))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_to_the_group_leave_the_rank_running(number: signal.Signals) -> None:
    async with rank() as client:
        os.kill(client.process_id, number)
        client.submit(submit_of(1, prompt_of(10), 5))
        transcript = Transcript()
        await read_until_ended(client, transcript, 1)
        assert transcript.ends[1].finish == "length"


async def test_a_closed_rank_has_ended_by_itself() -> None:
    async with rank() as client:
        client.submit(submit_of(1, prompt_of(10), 100_000))
        await anext(client.results)
        await client.close()
        assert client.closed.result() == 0
        await client.close()


async def test_a_rank_that_does_not_listen_is_killed() -> None:
    async with rank(oracle={"step_ms": 600_000.0}) as client:
        client.submit(submit_of(1, [1], 2))
        await eventually(lambda: bool(client.progress().step_loop_passes % 2))
        await client.close(grace_seconds=0.1)
        assert client.closed.result() == -signal.SIGKILL


async def test_a_start_that_is_given_up_leaves_no_process() -> None:
    before = set(psutil.Process().children())
    starting = asyncio.create_task(RankClient.start(oracle_config()))
    started = await asyncio.to_thread(wait_for_children, before)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    for process in started:
        await eventually(partial(has_ended, process.pid))


async def test_a_directory_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    with forked_services(), pytest.raises(CheckpointError, match=str(tmp_path)):
        await RankClient.start(EngineConfig(model_dir=tmp_path))


@pytest.mark.parametrize(
    ("reason", "error"),
    [("CONFIG", ConfigError), ("NAMESPACE_MISMATCH", NamespaceMismatch), ("SOMETHING_NEW", RemoteError)],
)
def test_an_error_at_start_keeps_its_class_or_reason(reason: str, error: type[MeshError]) -> None:
    found = _start_error(Failed(reason, "why"))
    assert (type(found), found.reason, found.message) == (error, reason, "why")


def test_an_error_at_start_on_another_host_names_it() -> None:
    failed = Failed("CONFIG", "engine.parallel makes 8 ranks, each on a GPU of its own, and torch finds 4")
    assert _start_error(failed, "rank 8 of 16 (host 1)").message == f"rank 8 of 16 (host 1): {failed.message}"


def test_a_rank_dies_with_its_service() -> None:
    service = subprocess.Popen([sys.executable, str(RANK_OWNER)], stdout=subprocess.PIPE, text=True, env=_environment())
    assert service.stdout is not None
    process_id = int(service.stdout.readline())
    assert not has_ended(process_id)
    service.kill()
    service.communicate()
    wait_until(lambda: has_ended(process_id))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


async def test_a_rank_traces_its_steps_beside_its_service(tmp_path: Path) -> None:
    client = await RankClient.start(oracle_config(), ObserveConfig(trace_file=tmp_path / "worker.json"))
    client.submit(submit_of(1, [1, 2, 3], max_tokens=2))
    async for result in steps(client):
        if result.outputs and result.outputs[0].finish:
            break
    await client.close()
    names = [event["name"] for event in json.loads((tmp_path / "worker.rank.json").read_text())]
    assert names.count("engine.step") == names.count("engine.collect") == 2
