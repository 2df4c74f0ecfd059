import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launcher.gpus import Gpu
from launcher.plan import ServiceSpec
from launcher.restart import RestartPolicy
from launcher.supervisor import Supervisor
from mesh.errors import ProcessFailed
from mesh.rpc.channel import Channels
from tests.support.forking import forked_services
from tests.support.waiting import eventually

QUICK = RestartPolicy(first_delay_seconds=0.05, attempts=2)


def probe(name: str, *settings: str, worker: bool = False, optional: bool = False) -> ServiceSpec:
    return ServiceSpec(name, "tests.support.probe_service", None, settings, 30.0, worker, optional)


@asynccontextmanager
async def supervised(*specs: ServiceSpec, policy: RestartPolicy = QUICK) -> AsyncIterator[tuple[Supervisor, list[str]]]:
    lines: list[str] = []
    supervisor = Supervisor(specs, lambda name, line: lines.append(f"{name}: {line}"), Channels(), policy)
    try:
        with forked_services():
            yield supervisor, lines
    finally:
        await supervisor.stop()


def said(lines: list[str], text: str) -> Callable[[], bool]:
    return lambda: any(text in line for line in lines)


async def test_what_is_not_ready_for_long_is_named() -> None:
    lines: list[str] = []
    supervisor = Supervisor(
        [probe("one"), probe("two", "ready_after=1.0")],
        lambda name, line: lines.append(line),
        Channels(),
        waiting_seconds=0.2,
    )
    try:
        await supervisor.start()
    finally:
        await supervisor.stop()
    assert any(line.startswith("waiting for two since ") for line in lines)


async def test_stopping_leaves_no_process() -> None:
    async with supervised(probe("one"), probe("two")) as (supervisor, _):
        await supervisor.start()
        process_ids = supervisor.process_ids
        assert all(psutil.pid_exists(each) for each in process_ids.values())
    assert set(process_ids) == {"one", "two"}
    assert not any(psutil.pid_exists(each) for each in process_ids.values())


async def test_a_restarted_worker_sees_its_gpu_first() -> None:
    worker = replace(probe("decode-0"), gpu=Gpu("1", ("0",)))
    supervisor = Supervisor((probe("one"), worker), lambda name, line: None, Channels())
    try:
        await supervisor.start()
        await supervisor.restart(["decode-0"])
        environments = {name: psutil.Process(each).environ() for name, each in supervisor.process_ids.items()}
    finally:
        await supervisor.stop()
    assert environments["decode-0"]["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert environments["one"].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


async def test_a_service_that_fails_to_start_is_named() -> None:
    async with supervised(probe("one"), probe("two", "fail=useless")) as (supervisor, _):
        with pytest.raises(ProcessFailed, match=r"two ended with status 2: probe: the checkpoint is broken"):
            await supervisor.start()
        one = supervisor.process_ids["one"]
    assert not psutil.pid_exists(one)


async def test_nothing_else_starts_before_the_first_service_is_ready() -> None:
    async with supervised(probe("one", "fail=later"), probe("two")) as (supervisor, _):
        with pytest.raises(ProcessFailed, match="one ended"):
            await supervisor.start()
        assert set(supervisor.process_ids) == {"one"}


async def test_a_killed_service_is_started_again() -> None:
    async with supervised(probe("one"), probe("two")) as (supervisor, lines):
        await supervisor.start()
        keeping = asyncio.create_task(supervisor.until_failure())
        await asyncio.sleep(0)
        before = supervisor.process_ids["two"]
        os.kill(before, signal.SIGKILL)
        await eventually(said(lines, "mesh: two ended with signal SIGKILL: starting it again in 0.05 s"))
        await eventually(lambda: supervisor.process_ids.get("two") not in (None, before))
        assert not keeping.done()
        keeping.cancel()


async def test_only_restarted_services_have_new_processes() -> None:
    async with supervised(probe("one"), probe("two"), probe("three")) as (supervisor, _):
        await supervisor.start()
        before = supervisor.process_ids
        await supervisor.restart(["two", "three"])
        after = supervisor.process_ids
        assert [name for name in before if before[name] == after[name]] == ["one"]
        assert not any(psutil.pid_exists(before[name]) for name in ("two", "three"))
        assert all(psutil.pid_exists(each) for each in after.values())


async def test_a_service_that_keeps_failing_ends_the_mesh(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    async with supervised(probe("one", f"fail_while={broken}")) as (supervisor, lines):
        await supervisor.start()
        broken.touch()
        os.kill(supervisor.process_ids["one"], signal.SIGKILL)
        with pytest.raises(ProcessFailed, match="one ended with status 1 and is not started again: probe: not now"):
            await supervisor.until_failure()
    assert said(lines, "starting it again")()


@pytest.mark.parametrize("fail", ["later", "useless"])
async def test_a_failing_start_of_what_served_is_tried_again(fail: str, tmp_path: Path) -> None:
    broken, log = tmp_path / "broken", tmp_path / "log"

    def starts() -> int:
        return len(log.read_text().splitlines())

    policy = RestartPolicy(first_delay_seconds=0.05, attempts=100)
    one = probe("one", f"fail={fail}", f"fail_while={broken}", f"log={log}")
    async with supervised(one, policy=policy) as (supervisor, _):
        await supervisor.start()
        keeping = asyncio.create_task(supervisor.until_failure())
        broken.touch()
        os.kill(supervisor.process_ids["one"], signal.SIGKILL)
        await eventually(lambda: starts() >= 2)
        broken.unlink()
        before = starts()
        await eventually(lambda: starts() > before)
        assert not keeping.done()
        keeping.cancel()


async def test_a_worker_is_given_up_while_another_serves(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    bad = probe("decode-0", f"fail_while={broken}", worker=True)
    async with supervised(probe("one"), bad, probe("decode-1", worker=True)) as (supervisor, lines):
        await supervisor.start()
        broken.touch()
        keeping = asyncio.create_task(supervisor.until_failure())
        os.kill(supervisor.process_ids["decode-0"], signal.SIGKILL)
        await eventually(said(lines, "going on without it"))
        assert not keeping.done()
        keeping.cancel()


async def test_the_last_worker_given_up_ends_the_mesh(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    bad = probe("decode-0", f"fail_while={broken}", worker=True)
    async with supervised(probe("one"), bad) as (supervisor, _):
        await supervisor.start()
        broken.touch()
        os.kill(supervisor.process_ids["decode-0"], signal.SIGKILL)
        with pytest.raises(ProcessFailed, match="decode-0"):
            await supervisor.until_failure()


async def test_an_optional_service_is_given_up(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    bad = probe("kvstore-0", f"fail_while={broken}", optional=True)
    async with supervised(probe("one"), bad) as (supervisor, lines):
        await supervisor.start()
        broken.touch()
        keeping = asyncio.create_task(supervisor.until_failure())
        os.kill(supervisor.process_ids["kvstore-0"], signal.SIGKILL)
        await eventually(said(lines, "kvstore-0 ended with status 1 and is not started again"))
        await eventually(said(lines, "going on without it"))
        assert not keeping.done()
        keeping.cancel()
