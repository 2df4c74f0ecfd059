"""Processes that are forked from one that has imported what they need: an oracle rank starts in a fifth of the time.

Their command line and /proc/PID/environ are those of that process. Tests of the start itself do without.
"""

import asyncio
import atexit
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from tempfile import TemporaryFile
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from mesh.processes.tether import die_with
from mesh.processes.tethered import start_tethered
from tests.support.gpus import has_gpu
from tests.support.programs import ROOT
from worker.ranks.process import AdoptedProcess

# As the workers' packages do, before the gateway, which is loaded first below, imports grpc.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
FORK = multiprocessing.get_context("forkserver")
_WORKERS = ("prefill_svc", "decode_svc")
_SERVICES = ("gateway", "scheduler", *_WORKERS, "kvstore", "engine.rank")
FORK.set_forkserver_preload([*(f"{each}.__main__" for each in _SERVICES), "tests.support.transfer_peer"])
# Received descriptors wait above all numbers that they may have to get.
_ABOVE = 512
_MOST_BYTES, _MOST_DESCRIPTORS = 1 << 20, 64
_RANKS_START = "worker.ranks.process.start_tethered"


@contextmanager
def forked_services() -> Iterator[None]:
    """Fork the services and ranks that this process starts in the block, and the first rank of each such service. On a
    machine with GPUs they start by themselves, because libraries settle on devices when they are loaded.
    """
    if has_gpu():
        yield
        return
    with patch(_RANKS_START, _start), patch("launcher.process.start_tethered", _start):
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


def _first_path(environment: Mapping[str, str]) -> str:
    return environment.get("PYTHONPATH", "").partition(os.pathsep)[0]


async def run_forked(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `python arguments`, which begin with -c PROGRAM or -m MODULE."""
    with TemporaryFile() as out, TemporaryFile() as err:
        process = await _start([sys.executable, *arguments], stdout=out.fileno(), stderr=err.fileno())
        status = await process.wait()
        written = []
        for each in (out, err):
            each.seek(0)
            written.append(each.read().decode())
    return status, *written


class _Program(NamedTuple):
    # -m or -c, then the module or the program, and its arguments.
    kind: str
    what: str
    arguments: Sequence[str]
    environment: Mapping[str, str]

    @classmethod
    def of(cls, command: Sequence[str], environment: Mapping[str, str] | None) -> "_Program":
        kind, what, *arguments = command[next(at for at, each in enumerate(command) if each in ("-m", "-c")) :]
        return cls(kind, what, arguments, dict(os.environ if environment is None else environment))

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        sys.argv = [self.what, *self.arguments]
        try:
            if self.kind == "-c":
                sys.modules["__main__"] = main = ModuleType("__main__")
                exec(self.what, vars(main))
            else:
                # runpy would warn that the module is there.
                sys.modules.pop(f"{self.what}.__main__", None)
                runpy.run_module(self.what, run_name="__main__", alter_sys=True)
        finally:
            # Processes that were forked end without.
            atexit._run_exitfuncs()


class _Descriptors:
    """Descriptors on their way to another process: the number there, and ours."""

    def __init__(self, ours: Mapping[int, int]) -> None:
        self._ours = ours

    def __getstate__(self) -> dict[int, Any]:
        return {number: DupFd(ours) for number, ours in self._ours.items()}

    def __setstate__(self, received: Mapping[int, Any]) -> None:
        self._received = received

    def settle(self) -> None:
        _settle({number: each.detach() for number, each in self._received.items()})


async def _start(
    command: Sequence[str],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
    env: Mapping[str, str] | None = None,
) -> Any:
    """mesh.processes.tethered.start_tethered. Only Python programs that import the code of this process are forked."""
    code = _first_path(os.environ if env is None else env)
    if command[0] != sys.executable or code not in (str(ROOT), _first_path(os.environ)):
        return await start_tethered(
            command, stdout=stdout, stderr=stderr, pass_fds=pass_fds, start_new_session=start_new_session, env=env
        )
    descriptors = {number: number for number in pass_fds}
    if stdout is not None and stderr is not None:
        descriptors |= {1: stdout, 2: stdout if stderr == asyncio.subprocess.STDOUT else stderr}
    arguments = (_Program.of(command, env), _Descriptors(descriptors), start_new_session)
    process = FORK.Process(target=_become, args=arguments, daemon=True)
    # Otherwise the process would first run the program that runs the tests, such as a profiler's script, and all tests.
    with patch.dict(sys.modules, __main__=ModuleType("__main__")):
        process.start()
    return ForkedProcess(process)


def _become(program: _Program, descriptors: _Descriptors, start_new_session: bool) -> None:
    die_with(os.getppid())
    # A collection of garbage that visited what is imported would have all of that memory copied.
    gc.freeze()
    if start_new_session:
        os.setsid()
    descriptors.settle()
    if program.what in _WORKERS:
        with patch(_RANKS_START, _Spare().start):
            program.run()
    else:
        program.run()


class _Spare:
    """A child that becomes the first rank that this process starts. It is forked while nothing runs here yet."""

    def __init__(self) -> None:
        service = os.getpid()
        self._ours: socket.socket | None
        self._ours, theirs = socket.socketpair()
        self._process_id = os.fork()
        if self._process_id == 0:
            self._ours.close()
            _wait_to_become(theirs, service)
        theirs.close()

    async def start(self, command: Sequence[str], *, pass_fds: Sequence[int], env: Mapping[str, str]) -> Any:
        if self._ours is None:
            return await start_tethered(command, pass_fds=pass_fds, env=env)
        with self._ours as ours:
            socket.send_fds(ours, [json.dumps([_Program.of(command, env), pass_fds]).encode()], pass_fds)
        self._ours = None
        return AdoptedProcess(self._process_id)


def _wait_to_become(requests: socket.socket, service: int) -> None:
    """Never returns."""
    status = 1
    try:
        die_with(service)
        with requests:
            message, received, _, _ = socket.recv_fds(requests, _MOST_BYTES, _MOST_DESCRIPTORS)
        if message:
            program, numbers = json.loads(message)
            _settle(dict(zip(numbers, received, strict=True)))
            _Program(*program).run()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _settle(received: Mapping[int, int]) -> None:
    """Give each received descriptor the number that it has to have in this process."""
    waiting = {}
    for number, each in received.items():
        waiting[number] = fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
        os.close(each)
    for number, each in waiting.items():
        os.dup2(each, number)
        os.close(each)
    # Those of the parent believe that they write to its files, whose kind may be another.
    for number, name in {1: "stdout", 2: "stderr"}.items():
        if number in received:
            setattr(sys, name, os.fdopen(number, "w", buffering=1, closefd=False))
