"""Processes that are forked from one that has imported what they need: an oracle rank starts in a fifth of the time.

Their command line and /proc/PID/environ are those of that process. Tests of the start itself do without.
"""

import asyncio
import atexit
import fcntl
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any
from unittest.mock import patch

from mesh.tether import die_with

FORK = multiprocessing.get_context("forkserver")
_SERVICES = ("gateway", "scheduler", "prefill_svc", "decode_svc", "kvstore", "engine.rank")
FORK.set_forkserver_preload([*(f"{each}.__main__" for each in _SERVICES), "tests.support.transfer_peer"])
# Received descriptors wait above all numbers that they may have to get.
_ABOVE = 512


@contextmanager
def forked_services() -> Iterator[None]:
    """Fork the services and ranks that this process starts in the block."""
    with (
        patch("worker.rank_process.start_tethered", _start),
        patch("cli.launcher.process.start_tethered", _start),
    ):
        yield


class ForkedProcess:
    """What ranks' clients and `Child` need of asyncio's Process."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        assert process.pid is not None
        self.pid: int = process.pid
        self._process = process

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        assert self._process.exitcode is not None
        return self._process.exitcode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


async def _start(
    command: Sequence[str],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
    env: Mapping[str, str] | None = None,
) -> Any:
    """mesh.tethered.start_tethered, for `python -m MODULE`."""
    module, *arguments = command[command.index("-m") + 1 :]
    descriptors = {number: number for number in pass_fds}
    if stdout is not None:
        assert stderr == asyncio.subprocess.STDOUT
        descriptors |= {1: stdout, 2: stdout}
    environment = dict(os.environ if env is None else env)
    setup = (module, arguments, environment, _Descriptors(descriptors), start_new_session)
    process = FORK.Process(target=_become, args=setup, daemon=True)
    process.start()
    return ForkedProcess(process)


class _Descriptors:
    """Descriptors on their way to another process: the number there, and ours."""

    def __init__(self, ours: Mapping[int, int]) -> None:
        self._ours = ours

    def __getstate__(self) -> dict[int, Any]:
        return {number: DupFd(ours) for number, ours in self._ours.items()}

    def __setstate__(self, received: Mapping[int, Any]) -> None:
        self._received = received

    def settle(self) -> None:
        """Give each the number that it has to have in this process."""
        waiting = {}
        for number, each in self._received.items():
            received = each.detach()
            waiting[number] = fcntl.fcntl(received, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
            os.close(received)
        for number, each in waiting.items():
            os.dup2(each, number)
            os.close(each)


def _become(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    descriptors: _Descriptors,
    start_new_session: bool,
) -> None:
    die_with(os.getppid())
    if start_new_session:
        os.setsid()
    descriptors.settle()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    # runpy would warn that the module is there.
    sys.modules.pop(f"{module}.__main__", None)
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        # Processes of multiprocessing end without.
        atexit._run_exitfuncs()
