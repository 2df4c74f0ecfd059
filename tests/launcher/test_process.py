import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.process import Child
from mesh.errors import ProcessFailed
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tests.support.programs import ROOT
from tests.support.waiting import eventually

SLEEP = "import time; time.sleep(60)"
READY_SERVER = """
import asyncio, sys
from mesh.config import ServerConfig
from mesh.rpc.server import MeshServer

async def main():
    async with MeshServer(ServerConfig(port=int(sys.argv[1])), "probe", []) as server:
        if sys.argv[2] == "ready":
            await server.ready()
        await server.until_signal()

asyncio.run(main())
"""
SUPERVISOR = """
import asyncio, sys
from launcher.process import Child

async def main():
    inner = "import subprocess, time; from mesh.processes.tethered import tethered; "
    inner += f"p = subprocess.Popen(tethered([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])); "
    inner += "print(p.pid, flush=True); time.sleep(60)"
    child = Child("child", [sys.executable, "-c", inner], lambda name, line: print(child.process_id, line, flush=True))
    await child.start()
    await child.wait()

asyncio.run(main())
"""


def child_of(program: str, *arguments: str, lines: list[str] | None = None) -> Child:
    seen: list[str] = [] if lines is None else lines
    return Child("probe", [sys.executable, "-c", program, *arguments], lambda _, line: seen.append(line))


def gone(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_every_line_of_both_streams_is_read() -> None:
    lines: list[str] = []
    child = child_of("import sys; print('out', flush=True); print('err', file=sys.stderr)", lines=lines)
    await child.start()
    assert await child.wait() == 0
    assert lines == ["out", "err"]


async def test_a_last_line_without_its_newline_is_read() -> None:
    lines: list[str] = []
    child = child_of("print('half', end='')", lines=lines)
    await child.start()
    await child.wait()
    assert lines == ["half"]


async def test_an_endless_line_is_cut_and_not_held_in_memory() -> None:
    lines: list[str] = []
    child = child_of("print('x' * 1_000_000, end='')", lines=lines)
    await child.start()
    await child.wait()
    assert sum(map(len, lines)) == 1_000_000
    assert max(map(len, lines)) < 200_000


async def test_a_child_that_listens_to_sigterm_ends_by_itself() -> None:
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7)); print('up', flush=True)"
    lines: list[str] = []
    child = child_of(program + "; time.sleep(60)", lines=lines)
    await child.start()
    await eventually(lambda: lines == ["up"])
    await child.stop(10)
    assert await child.wait() == 7


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace() -> None:
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    lines: list[str] = []
    child = child_of(program, lines=lines)
    await child.start()
    await eventually(lambda: lines == ["up"])
    await child.stop(0.1)
    assert await child.wait() == -signal.SIGKILL


async def test_stopping_what_has_ended_does_nothing() -> None:
    child = child_of("pass")
    await child.start()
    await child.wait()
    await child.stop(0)
    assert await child.wait() == 0


async def test_processes_that_a_child_started_die_with_it() -> None:
    program = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEP!r}]).pid)"
    lines: list[str] = []
    child = child_of(program, lines=lines)
    await child.start()
    assert await child.wait() == 0
    await eventually(lambda: gone(int(lines[0])))


async def test_wait_ready_returns_once_health_says_so() -> None:
    port = free_port()
    child = child_of(READY_SERVER, str(port), "ready")
    await child.start()
    try:
        await child.wait_ready(f"127.0.0.1:{port}", Channels(), 90)
    finally:
        await child.stop(5)


async def test_wait_ready_gives_up_in_time() -> None:
    port = free_port()
    child = child_of(READY_SERVER, str(port), "not ready")
    await child.start()
    try:
        with pytest.raises(ProcessFailed, match=r"probe was not ready after 0\.5 s"):
            await child.wait_ready(f"127.0.0.1:{port}", Channels(), 0.5)
    finally:
        await child.stop(5)


async def test_a_child_that_ends_early_leaves_its_words() -> None:
    child = child_of("import sys; sys.exit('probe: the disk is full: make room')")
    await child.start()
    with pytest.raises(ProcessFailed, match=r"probe ended with status 1: probe: the disk is full: make room"):
        await child.wait_ready("127.0.0.1:1", Channels(), 90)


async def test_a_supervisor_that_is_killed_leaves_no_process() -> None:
    supervisor = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", SUPERVISOR], cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout is not None
    child, grandchild = map(int, (await supervisor.stdout.readline()).split())
    supervisor.kill()
    await supervisor.wait()
    await eventually(lambda: gone(child) and gone(grandchild))


async def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    tether = ROOT / "mesh" / "processes" / "tether.py"
    command = [sys.executable, str(tether), "1", sys.executable, "-c", "print('ran')"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


async def test_a_terminals_interrupt_does_not_reach_children() -> None:
    child = child_of(SLEEP)
    await child.start()
    try:
        assert os.getpgid(child.process_id) != os.getpgid(0)
    finally:
        await child.stop(1)


def test_the_tether_imports_nothing_of_ours() -> None:
    text = (Path(ROOT) / "mesh" / "processes" / "tether.py").read_text()
    assert "import mesh" not in text and "from mesh" not in text
