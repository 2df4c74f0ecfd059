"""The process of a rank, as the service of its host has it: how it is started, and what leads to it."""

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from engine.config import EngineConfig
from engine.parallel.peers import GroupDescriptors
from engine.protocol.frames import RECEIVE_BYTES
from engine.protocol.messages import Start
from engine.protocol.pulse import Pulse
from mesh import tether
from mesh.config import ObserveConfig
from transfer.block_macs import Authorship


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The kernel ties its life to the thread that started it."""

    process: asyncio.subprocess.Process
    # Both ends of the socket to it.
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pulse: Pulse
    # The pulse's memory; whoever has this object closes it.
    pulse_descriptor: int


async def start_rank(config: EngineConfig, rank: int, group: GroupDescriptors | None) -> RankProcess:
    """Start the worker's rank of that number, which waits for Start.

    group: what it shares with the other ranks, if there are any; to be closed when this has returned.
    """
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        # Before the process, so that a start which is cancelled here leaves none.
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
    """What the rank is told first."""
    settings = _rank_settings(observe or ObserveConfig(), rank)
    return Start(config.model_dump_json().encode(), settings.model_dump_json().encode(), authorship)


def rank_environment(config: EngineConfig) -> dict[str, str]:
    """The environment of a process that computes as `config` says; variables that are set here stay."""
    # On a busy machine a compute thread that spins while it waits for its twin keeps that twin off its core: measured
    # with one other process on two cores, steps took 30 times as long. Asleep it costs a step 5 to 10%.
    # numpy's own threads have nothing to multiply here, and spin at the start.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1", **os.environ}
    if config.rank_threads is not None:
        # Read once, when the libraries load.
        environment |= {"OMP_NUM_THREADS": str(config.rank_threads), "MKL_NUM_THREADS": str(config.rank_threads)}
    return environment


async def _spawn(
    config: EngineConfig, rank: int, own: Sequence[int], group: GroupDescriptors | None
) -> asyncio.subprocess.Process:
    """Start a rank. own: the descriptors of its connection and its pulse."""
    shared = [] if group is None else group.arguments
    tethered = [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())]
    # The rank follows our own rule for sys.path, so that it imports the code that this process runs.
    path_rule = ["-P"] if sys.flags.safe_path else []
    return await asyncio.create_subprocess_exec(
        *tethered,
        *[sys.executable, *path_rule, "-m", "engine.rank", str(rank), *map(str, own), *shared],
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=[*own, *(() if group is None else group.all)],
        env=rank_environment(config),
    )


def _rank_settings(observe: ObserveConfig, rank: int) -> ObserveConfig:
    """The service's settings with a trace file of the rank's own: `x.json` becomes `x.rank.json` or `x.rank1.json`."""
    path = observe.trace_file
    if path is None:
        return observe
    return observe.model_copy(update={"trace_file": path.with_name(f"{path.stem}.rank{rank or ''}{path.suffix}")})
