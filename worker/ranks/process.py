"""The process of a rank, as the service of its host holds it: started, or adopted, and the channels to it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.parallel.peers import GroupDescriptors
from engine.protocol.frames import RECEIVE_BYTES
from engine.protocol.messages import Start
from engine.protocol.pulse import Pulse
from mesh.config import ObserveConfig
from mesh.processes.tethered import start_tethered
from transfer.block_macs import Authorship


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A started rank. The kernel ties its life to the thread that started it."""

    process: asyncio.subprocess.Process
    # The service's end of the socket, for reading and writing.
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pulse: Pulse
    # The pulse's memory; the owner of this object closes it.
    pulse_descriptor: int


async def start_rank(config: EngineConfig, rank: int, group: GroupDescriptors | None) -> RankProcess:
    """Start rank number `rank` of the worker; it waits for the message Start.

    group: what it shares with the other ranks, if there are any; close it when this has returned.
    """
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        # Opened before the process starts: if the call is cancelled here, no process is left running.
        reader, writer = await asyncio.open_connection(sock=ours, limit=RECEIVE_BYTES)
        undo.callback(writer.close)
        pulse, descriptor = Pulse.create()
        undo.callback(os.close, descriptor)
        process = await _spawn(config, rank, [theirs.fileno(), descriptor], group)
        undo.pop_all()
    return RankProcess(process, reader, writer, pulse, descriptor)


def start_message(
    config: EngineConfig, observe: ObserveConfig | None, rank: int, authorship: Authorship | None
) -> Start:
    """The rank's first message. rank: its number in the worker."""
    settings = _rank_settings(observe or ObserveConfig(), rank)
    return Start(config.model_dump_json().encode(), settings.model_dump_json().encode(), rank, authorship)


def rank_environment(config: EngineConfig) -> dict[str, str]:
    """The environment of a process that computes as `config` says. Variables that are set already stay."""
    # If a compute thread spins while it waits for another, it may keep that one off its core on a busy machine: with
    # one other process on two cores, steps took 30 times as long. Passive waiting costs a step 5 to 10%. numpy's own
    # threads have nothing to multiply here, and would spin at the start.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    if config.rank_threads is not None:
        # The libraries read these once, when they load.
        environment |= {"OMP_NUM_THREADS": str(config.rank_threads), "MKL_NUM_THREADS": str(config.rank_threads)}
    return environment


async def _spawn(
    config: EngineConfig, rank: int, own: Sequence[int], group: GroupDescriptors | None
) -> asyncio.subprocess.Process:
    """Start a rank. own: the descriptors of its connection and its pulse."""
    shared = [] if group is None else group.arguments
    # The rank uses our own rule for sys.path, so that it imports the same code as this process.
    path_rule = ["-P"] if sys.flags.safe_path else []
    return await start_tethered(
        [sys.executable, *path_rule, "-m", "engine.rank", str(rank), *map(str, own), *shared],
        pass_fds=[*own, *(() if group is None else group.all)],
        env=rank_environment(config),
    )


def _rank_settings(observe: ObserveConfig, rank: int) -> ObserveConfig:
    """The service's settings with the rank's own trace file: `x.json` becomes `x.rank.json` or `x.rank1.json`."""
    path = observe.trace_file
    if path is None:
        return observe
    return observe.model_copy(update={"trace_file": path.with_name(f"{path.stem}.rank{rank or ''}{path.suffix}")})


class AdoptedProcess:
    """A child that this process had before it became another program (exec), and that asyncio therefore does not know.

    It is the part of asyncio's Process that a rank's client needs. Call `wait` only once.
    """

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        # This also works if the process has ended: it stays a zombie until we wait for it.
        self._descriptor = os.pidfd_open(process_id)

    def kill(self) -> None:
        """Raises ProcessLookupError if the process has ended."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def wait(self) -> int:
        """The exit status, once the process has ended; a negative status is the number of a signal."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        # The descriptor becomes readable when the process ends.
        loop.add_reader(self._descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._descriptor)
        # The process has ended, so this returns at once.
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222
        return os.waitstatus_to_exitcode(status)
