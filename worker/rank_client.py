"""A service's handle on one rank: starts the process, exchanges messages with it, and leaves none behind."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from engine.config import EngineConfig
from engine.parallel.peers import GroupDescriptors
from engine.protocol.frames import RECEIVE_BYTES, FrameDecoder, FrameEncoder
from engine.protocol.messages import (
    AttachStore,
    Cancel,
    DetachStore,
    Failed,
    FirstToken,
    FromRank,
    PushOffer,
    Ready,
    Release,
    Released,
    Start,
    StepResult,
    Stop,
    Submit,
    ToRank,
    TransferNews,
)
from engine.protocol.pulse import Progress, Pulse
from mesh import tether
from mesh.config import ObserveConfig
from mesh.errors import EngineFailed, MeshError, rebuild
from transfer.block_macs import Authorship
from transfer.ticket import StoreSession, Ticket
from worker.adopted_process import AdoptedProcess
from worker.handover import RankHandle

STOP_GRACE_SECONDS = 5.0


class RankClient:
    """Made by `start`, in the main thread: the kernel ties the rank's life to the thread that forked; or by `adopt`.

    Messages arrive in the order of the calls; each method that sends raises EngineFailed if the rank has gone.

    Attributes:
        name: what errors call the rank.
        ready: what the rank reported when it had loaded.
        results: step results and news of transfers, in order. Iterate it once, and promptly: after some MB of unread
            results the engine pauses. It ends when the rank is released or has gone, and raises EngineFailed if that
            said why.
        closed: done when the process has ended, with its exit status. Wrap it in `asyncio.shield` to await it under
            a timeout.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process | AdoptedProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pulse: Pulse,
        pulse_descriptor: int,
    ) -> None:
        """pulse_descriptor: of the pulse's memory; the client closes it."""
        self.name = name
        self._process = process
        self._reader = reader
        self._writer = writer
        self._pulse_descriptor: int | None = pulse_descriptor
        self._pulse = pulse
        # It was told to forget its requests: nobody need tell it anything of them any more.
        self._leaves = False
        self._released: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._encoder = FrameEncoder()
        self._decoder: FrameDecoder[FromRank] = FrameDecoder(FromRank)
        self.closed: asyncio.Future[int] = asyncio.ensure_future(process.wait())
        self.ready: Ready
        self._messages = self._receive()
        self.results: AsyncIterator[StepResult | TransferNews] = self._results()

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        observe: ObserveConfig | None = None,
        rank: int = 0,
        name: str = "the engine process",
        group: GroupDescriptors | None = None,
        authorship: Authorship | None = None,
    ) -> Self:
        """Start the worker's rank of that number, which logs and traces as `observe` says; return when it has loaded.

        group: what it shares with the other ranks, if there are any; to be closed when `start` has returned.
        authorship: what it vouches for blocks with.
        Raises CheckpointError or ConfigError where starting again cannot help, EngineFailed otherwise.
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
        client = cls(name, process, reader, writer, pulse, descriptor)
        await client._load(config, observe, rank, authorship)
        return client

    @classmethod
    async def adopt(
        cls,
        handle: RankHandle,
        config: EngineConfig,
        observe: ObserveConfig | None = None,
        rank: int = 0,
        name: str = "the engine process",
        authorship: Authorship | None = None,
    ) -> Self:
        """The client of a released rank, which keeps its weights; return when it is ready to serve as `config` says.

        Raises what `start` raises, ConfigError also where the weights cannot be kept, and ends the rank then.
        """
        for descriptor in (handle.socket, handle.pulse):
            os.set_inheritable(descriptor, False)
        ours = socket.socket(fileno=handle.socket)
        reader, writer = await asyncio.open_connection(sock=ours, limit=RECEIVE_BYTES)
        client = cls(name, AdoptedProcess(handle.process_id), reader, writer, Pulse(handle.pulse), handle.pulse)
        await client._load(config, observe, rank, authorship)
        return client

    async def _load(
        self, config: EngineConfig, observe: ObserveConfig | None, rank: int, authorship: Authorship | None
    ) -> None:
        started = False
        try:
            settings = _rank_settings(observe or ObserveConfig(), rank)
            self._send(Start(config.model_dump_json().encode(), settings.model_dump_json().encode(), authorship))
            self.ready = await self._until_ready()
            started = True
        finally:
            if not started:
                await self._kill()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def progress(self) -> Progress:
        """How far the rank had come at its last heartbeat."""
        return self._pulse.read()

    def submit(self, submit: Submit) -> None:
        self._send(submit)

    def cancel(self, key: int) -> None:
        self._send(Cancel(key))

    def first_token(self, first: FirstToken) -> None:
        self._send(first)

    def attach_store(self, session: StoreSession) -> None:
        self._send(AttachStore(session))

    def detach_store(self, store_id: str) -> None:
        self._send(DetachStore(store_id))

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        """Push the blocks with these hashes into a store's landing."""
        self._send(PushOffer(ticket, list(hashes)))

    async def release(self) -> RankHandle:
        """Have the rank forget all but its weights, for another client to adopt; `results` must be read meanwhile.

        Raises EngineFailed if it ends instead.
        """
        self._send(Release())
        self._leaves = True
        await asyncio.wait({self._released, self.closed}, return_when=asyncio.FIRST_COMPLETED)
        if not self._released.done():
            raise EngineFailed(f"{self.name} has ended")
        assert self._pulse_descriptor is not None
        # What reads and writes the socket here goes with this program.
        connection = os.dup(self._writer.get_extra_info("socket").fileno())
        return RankHandle(self.process_id, connection, self._pulse_descriptor)

    def kill(self) -> None:
        """Kill the process at once; `close` waits until it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Stop the rank, by force after the grace; may be called twice. Requests in it are lost."""
        try:
            with suppress(EngineFailed):
                self._send(Stop())
            await asyncio.wait({self.closed}, timeout=grace_seconds)
        finally:
            await self._kill()

    def _send(self, message: ToRank) -> None:
        if self._leaves:
            return
        if self.closed.done() or self._writer.is_closing():
            raise EngineFailed(f"{self.name} has ended")
        self._writer.write(bytes(self._encoder.encode(message)))

    async def _until_ready(self) -> Ready:
        message = await anext(self._messages, None)
        if message is None:
            status = await asyncio.shield(self.closed)
            raise EngineFailed(f"{self.name} ended with status {status} while it started: see its last lines")
        if isinstance(message, Failed):
            raise _start_error(message)
        assert isinstance(message, Ready)
        return message

    async def _results(self) -> AsyncIterator[StepResult | TransferNews]:
        async for message in self._messages:
            if isinstance(message, Failed):
                raise EngineFailed(f"{self.name}: {message.message}")
            if isinstance(message, Released):
                self._released.set_result(self.process_id)
                return
            assert not isinstance(message, Ready)
            yield message

    async def _receive(self) -> AsyncIterator[FromRank]:
        # A killed rank with unread input resets the connection instead of ending it.
        with suppress(ConnectionError):
            while data := await self._reader.read(RECEIVE_BYTES):
                for message in self._decoder.feed(data):
                    yield message

    async def _kill(self) -> None:
        self.kill()
        await asyncio.shield(self.closed)
        self._writer.close()
        if self._pulse_descriptor is not None:
            os.close(self._pulse_descriptor)
            self._pulse_descriptor = None


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
    descriptors = [*own, *(() if group is None else (group.memory, *group.wakeups))]
    tethered = [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())]
    # The rank follows our own rule for sys.path, so that it imports the code that this process runs.
    path_rule = ["-P"] if sys.flags.safe_path else []
    return await asyncio.create_subprocess_exec(
        *tethered,
        *[sys.executable, *path_rule, "-m", "engine.rank", str(rank), *map(str, descriptors)],
        stdin=asyncio.subprocess.DEVNULL,
        pass_fds=descriptors,
        env=rank_environment(config),
    )


def _rank_settings(observe: ObserveConfig, rank: int) -> ObserveConfig:
    """The service's settings with a trace file of the rank's own: `x.json` becomes `x.rank.json` or `x.rank1.json`."""
    path = observe.trace_file
    if path is None:
        return observe
    return observe.model_copy(update={"trace_file": path.with_name(f"{path.stem}.rank{rank or ''}{path.suffix}")})


def _start_error(failed: Failed) -> MeshError:
    error = rebuild(failed.reason, failed.message)
    if isinstance(error, EngineFailed):
        return EngineFailed(f"the engine could not start: {failed.message}")
    return error
