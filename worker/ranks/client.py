"""A service's handle on one rank: starts the process, exchanges messages with it, and leaves no process running."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Self

from engine.config import EngineConfig
from engine.parallel.peers import GroupDescriptors
from engine.protocol.frames import RECEIVE_BYTES, FrameDecoder, FrameEncoder
from engine.protocol.messages import (
    AttachStore,
    Cancel,
    DetachStore,
    Failed,
    FirstToken,
    Found,
    FromRank,
    LookUp,
    Publish,
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
from engine.protocol.pulse import LoopProgress, Pulse
from mesh.config import ObserveConfig
from mesh.errors import EngineFailed, MeshError, rebuild
from mesh.processes.exit_status import describe_status
from transfer.block_macs import Authorship
from transfer.ticket import StoreSession, Ticket
from worker.handover import RankHandle
from worker.hosts.remote_rank import RemoteRank
from worker.hosts.rendezvous import HostsRendezvous
from worker.ranks.process import AdoptedProcess, start_message, start_rank

STOP_GRACE_SECONDS = 5.0


class RankClient:
    """Made by `start`, by `adopt`, or by `reach`. Call `start` in the main thread: the kernel ties the rank's life to
    the thread that forked it.

    Messages arrive in the order of the calls; each method that sends raises EngineFailed if the rank has died.

    Attributes:
        name: the rank's name in errors.
        ready: the rank's description of itself after loading.
        results: step results and news of transfers, in order. Iterate it once, and promptly: after some MB of unread
            results the engine pauses. It ends when the rank is released or has died, and raises EngineFailed if the
            rank said why.
        closed: done once the process has ended, with its exit status. Wrap it in `asyncio.shield` to await it under a
            timeout.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process | AdoptedProcess | RemoteRank,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter | RemoteRank,
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
        # The rank was told to forget its requests, so it needs no further messages about them.
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
        rendezvous: HostsRendezvous | None = None,
    ) -> Self:
        """Start rank number `rank` of the worker, which logs and traces as `observe` says; return once it has loaded.

        group: what it shares with the other ranks, if there are any; close it when `start` has returned.
        authorship: what it signs blocks with; rendezvous: where it meets ranks of other hosts, if there are any.
        Raises CheckpointError or ConfigError if starting again cannot help, otherwise EngineFailed.
        """
        started = await start_rank(config, rank, group)
        client = cls(name, started.process, started.reader, started.writer, started.pulse, started.pulse_descriptor)
        await client._load(start_message(config, observe, rank, authorship), rendezvous)
        return client

    @classmethod
    async def reach(cls, remote: RemoteRank, name: str, rendezvous: HostsRendezvous) -> Self:
        """The client of a rank on another host, whose service starts it; return once it has loaded.

        Raises what `start` raises, after ending the rank.
        """
        pulse, descriptor = Pulse.create()
        remote.shows_progress_by(pulse)
        client = cls(name, remote, remote.reader, remote, pulse, descriptor)
        await client._load(None, rendezvous)
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
        rendezvous: HostsRendezvous | None = None,
    ) -> Self:
        """The client of a released rank, which keeps its weights; return once it is ready to serve as `config` says.

        Raises what `start` raises, and ConfigError if the weights cannot be kept, after ending the rank.
        """
        for descriptor in (handle.socket, handle.pulse):
            os.set_inheritable(descriptor, False)
        ours = socket.socket(fileno=handle.socket)
        reader, writer = await asyncio.open_connection(sock=ours, limit=RECEIVE_BYTES)
        client = cls(name, AdoptedProcess(handle.process_id), reader, writer, Pulse(handle.pulse), handle.pulse)
        await client._load(start_message(config, observe, rank, authorship), rendezvous)
        return client

    async def _load(self, start: Start | None, rendezvous: HostsRendezvous | None) -> None:
        """start: the first message; None if another service sends it."""
        started = False
        try:
            if start is not None:
                self._send(start)
            self.ready = await self._until_ready(rendezvous)
            started = True
        finally:
            if not started:
                await self._kill()

    @property
    def process_id(self) -> int:
        """The process id of a rank on this host."""
        assert not isinstance(self._process, RemoteRank)
        return self._process.pid

    def progress(self) -> LoopProgress:
        """The rank's progress at its last heartbeat."""
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
        """Have the rank forget all but its weights, so that another client can adopt it. `results` must be read
        meanwhile.

        Raises EngineFailed if the rank ends instead.
        """
        self._send(Release())
        self._leaves = True
        await asyncio.wait({self._released, self.closed}, return_when=asyncio.FIRST_COMPLETED)
        if not self._released.done():
            raise EngineFailed(f"{self.name} has ended")
        assert self._pulse_descriptor is not None and not isinstance(self._writer, RemoteRank)
        # The descriptor is duplicated because the present one closes with this program's reader and writer.
        connection = os.dup(self._writer.get_extra_info("socket").fileno())
        return RankHandle(self.process_id, connection, self._pulse_descriptor)

    def kill(self) -> None:
        """Kill the process at once; `close` waits until it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Stop the rank, by force after the grace. May be called twice. Its requests are lost."""
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

    async def _until_ready(self, rendezvous: HostsRendezvous | None) -> Ready:
        message = await anext(self._messages, None)
        while isinstance(message, Publish | LookUp):
            assert rendezvous is not None
            await self._meet(message, rendezvous)
            message = await anext(self._messages, None)
        if message is None:
            status = await asyncio.shield(self.closed)
            raise EngineFailed(f"{self.name} ended with {describe_status(status)} while it started: see its last lines")
        if isinstance(message, Failed):
            raise _start_error(message, self.name if isinstance(self._process, RemoteRank) else None)
        if isinstance(message, Released):
            raise EngineFailed(f"{self.name} has lost another rank of the worker while it started")
        assert isinstance(message, Ready)
        return message

    async def _meet(self, message: Publish | LookUp, rendezvous: HostsRendezvous) -> None:
        if isinstance(message, Publish):
            rendezvous.publish(message.key, message.value)
            return
        found: asyncio.Future[Any] = asyncio.ensure_future(rendezvous.look_up(message.key))
        try:
            # The process may end first.
            await asyncio.wait({found, self.closed}, return_when=asyncio.FIRST_COMPLETED)
            if found.done():
                self._send(Found(found.result()))
        finally:
            found.cancel()

    async def _results(self) -> AsyncIterator[StepResult | TransferNews]:
        async for message in self._messages:
            if isinstance(message, Failed):
                raise EngineFailed(f"{self.name}: {message.message}")
            if isinstance(message, Released):
                self._released.set_result(self.process_id)
                return
            assert not isinstance(message, Ready | Publish | LookUp)
            yield message

    async def _receive(self) -> AsyncIterator[FromRank]:
        # If a killed rank had unread input, its connection is reset rather than closed.
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


def _start_error(failed: Failed, elsewhere: str | None = None) -> MeshError:
    """elsewhere: the rank's name, if it lies on another host, which may have fewer GPUs or another checkpoint."""
    message = failed.message if elsewhere is None else f"{elsewhere}: {failed.message}"
    error = rebuild(failed.reason, message)
    if isinstance(error, EngineFailed):
        return EngineFailed(f"the engine could not start: {message}")
    return error
