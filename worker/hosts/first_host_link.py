"""The service of a host other than the worker's first: it owns ranks, and the first host's service uses them."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
from deepmesh.internal.v1 import hosts_pb2, hosts_pb2_grpc

from engine.protocol.pulse import LoopProgress
from mesh.backoff import Backoff
from mesh.domain.workers import WorkerRole
from mesh.errors import EngineFailed, MeshError, Retry
from mesh.rpc.channel import service_channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer
from mesh.tls import server_tls
from worker.config import WorkerConfig
from worker.hosts import wire
from worker.hosts.comparison import own_version
from worker.hosts.fewer import on_hosts
from worker.hosts.host_ranks import HostRanks
from worker.hosts.place import HostPlace
from worker.settled import settled

# Messages that may wait to be written to the first host; if there are more, ranks have to wait.
MOST_WAITING = 64

# How long the ranks' last output may take to reach the first host.
FLUSH_SECONDS = 2.0

# The longest pause between two calls to a first host that does not answer. All ranks of the worker wait for this one.
LAST_PAUSE_SECONDS = 1.0

_log = logging.getLogger("deepmesh.worker")


async def serve_host(config: WorkerConfig, role: WorkerRole, place: HostPlace) -> None:
    """Own this host's ranks until the first host's service stops them, or until a signal. Ready while they run.

    If the first host's service ends before, or lets this host go because another was lost, the ranks keep what they
    have loaded, and this host joins again. A signal to this host alone has the worker drain before it goes on without
    it; a host that has not joined ends at once. config: must have the worker's id. Raises ConfigError if the first host
    refuses this one, EngineFailed if a rank ends before it was stopped, or cannot keep what it has loaded.
    """
    resolved = settled(config, role)
    async with MeshServer(config.server, role.value, [], server_tls(config.security.tls)) as server:
        signalled, stopping, joined = asyncio.create_task(server.until_signal()), asyncio.Event(), asyncio.Event()
        serving = asyncio.create_task(_serve(config, resolved, role, place, server, stopping, joined))
        try:
            await asyncio.wait({signalled, serving}, return_when=asyncio.FIRST_COMPLETED)
            if joined.is_set() and not serving.done():
                # The worker may have requests to finish.
                _log.info("waiting for the worker's first host to stop the ranks")
                stopping.set()
                await asyncio.wait({serving}, timeout=config.server.drain_seconds)
            if serving.done():
                serving.result()
        finally:
            signalled.cancel()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


async def _serve(
    config: WorkerConfig,
    resolved: WorkerConfig,
    role: WorkerRole,
    place: HostPlace,
    server: MeshServer,
    stopping: asyncio.Event,
    joined: asyncio.Event,
) -> None:
    """stopping: set once this host has been told to stop; joined: set here while the host belongs to the worker."""
    assert config.worker_id is not None and place.first is not None
    join = wire.join(config.worker_id, place.number, config.engine.model_dump_json().encode(), own_version())
    async with service_channels(config.security.tls).open(place.first, Role(role.value)) as channel:
        stub, ranks, stopped = hosts_pb2_grpc.HostsServiceStub(channel), None, False
        try:
            while not stopped:
                link, worker = await _join(stub, join, place.first)
                joined.set()
                try:
                    ranks = ranks or await HostRanks.start(resolved, place.number)
                    await server.ready()
                    _log.info("host ready", extra={"fields": {"host": place.number, "worker": config.worker_id}})
                    stopped = await link.run(ranks, on_hosts(resolved, worker.hosts), worker.place, stopping)
                finally:
                    joined.clear()
                    link.close()
                stopped = stopped or stopping.is_set()
                if not stopped:
                    await server.drain()
                    await ranks.keep()
                    _log.warning("a host of the worker was lost: this one keeps its weights, and joins again")
        finally:
            if ranks is not None:
                await ranks.close()


async def _join(
    stub: hosts_pb2_grpc.HostsServiceStub, join: hosts_pb2.JoinWorkerRequest, first: str
) -> tuple[FirstHostLink, hosts_pb2.Joined]:
    """Call until the first host answers. Raises its answer if it never takes this host."""
    backoff = Backoff(_log, last_seconds=LAST_PAUSE_SECONDS)
    while True:
        link = FirstHostLink(stub, join)
        try:
            return link, await link.joined()
        except MeshError as error:
            link.close()
            if error.retry is Retry.NEVER:
                raise
            await backoff.failed(f"not joined to the worker's first host at {first}", error)


class FirstHostLink:
    """A worker.hosts.host_ranks.FirstHost over one call."""

    def __init__(self, stub: hosts_pb2_grpc.HostsServiceStub, join: hosts_pb2.JoinWorkerRequest) -> None:
        self._outgoing: asyncio.Queue[hosts_pb2.JoinWorkerRequest | None] = asyncio.Queue(MOST_WAITING)
        self._call: Any = stub.JoinWorker(self._requests(join))

    async def joined(self) -> hosts_pb2.Joined:
        """Return once the first host has taken this one. Raises MeshError."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if response is grpc.aio.EOF:
            raise EngineFailed("the worker's first host ended the call")
        joined: hosts_pb2.Joined = response.joined
        return joined

    async def run(self, ranks: HostRanks, config: WorkerConfig, place: int, stopping: asyncio.Event) -> bool:
        """Carry messages between the ranks and the first host until all ranks have stopped, or until the first host
        says no more, and then return False. Raises EngineFailed if a rank ends otherwise.

        config, place: as for `HostRanks.run`; stopping: the first host is told of it once it is set.
        """
        owning = asyncio.create_task(ranks.run(self, config, place))
        reading = asyncio.create_task(self._read(ranks))
        telling = asyncio.create_task(self._tell(stopping))
        try:
            await asyncio.wait({owning, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not owning.done():
                reading.result()
                return False
            await self._outgoing.put(None)
            await asyncio.wait({reading}, timeout=FLUSH_SECONDS)
            owning.result()
            return True
        finally:
            for task in (owning, reading, telling):
                task.cancel()
            await asyncio.gather(owning, reading, telling, return_exceptions=True)

    def close(self) -> None:
        self._call.cancel()

    async def data(self, rank: int, data: bytes) -> None:
        await self._outgoing.put(wire.from_rank(rank, data))

    async def ended(self, rank: int, status: int) -> None:
        await self._outgoing.put(wire.ended(rank, status))

    async def progress(self, ranks: Mapping[int, LoopProgress]) -> None:
        await self._outgoing.put(wire.progress(ranks))

    async def record(self, record: bytes) -> None:
        await self._outgoing.put(wire.record_from_host(record))

    async def _tell(self, stopping: asyncio.Event) -> None:
        await stopping.wait()
        await self._outgoing.put(wire.stopping())

    async def _requests(self, join: hosts_pb2.JoinWorkerRequest) -> AsyncIterator[hosts_pb2.JoinWorkerRequest]:
        yield join
        while (request := await self._outgoing.get()) is not None:
            yield request

    async def _read(self, ranks: HostRanks) -> None:
        """Do what the first host's messages say, until they end."""
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                _handle(ranks, response)
        except grpc.aio.AioRpcError as error:
            _log.warning("the first host's stream broke", extra={"fields": {"why": from_rpc_error(error).message}})


def _handle(ranks: HostRanks, response: hosts_pb2.JoinWorkerResponse) -> None:
    kind = response.WhichOneof("message")
    if kind == "to_rank":
        ranks.write(response.to_rank.rank, response.to_rank.data)
    elif kind == "record":
        ranks.record(response.record)
    elif kind == "kill":
        ranks.kill(response.kill.rank)
