"""HostsService: how the service of a worker's first host answers those of its other hosts."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import grpc
from deepmesh.internal.v1 import hosts_pb2, hosts_pb2_grpc

from mesh.domain.workers import WorkerRole
from mesh.errors import InvalidRequest
from mesh.rpc.identity import Role, check_host
from mesh.rpc.server import Registration
from worker.config import WorkerConfig
from worker.hosts import wire
from worker.hosts.joined import JoinedHost, JoinedHosts
from worker.hosts.remote_rank import RemoteRank

SERVICE = "deepmesh.internal.v1.HostsService"
SERVES = {"JoinWorker": (Role.PREFILL, Role.DECODE)}
JOIN_SECONDS = 10.0

_Outgoing = asyncio.Queue[hosts_pb2.JoinWorkerResponse | None]


class HostsServicer(hosts_pb2_grpc.HostsServiceServicer):
    """A worker with one host refuses every other.

    Attributes:
        hosts: the hosts that have joined.
    """

    def __init__(self, config: WorkerConfig, role: WorkerRole) -> None:
        self._config = config
        self._role = role
        self.hosts = JoinedHosts(config.engine)

    @property
    def registration(self) -> Registration:
        add = hosts_pb2_grpc.add_HostsServiceServicer_to_server
        return Registration(add, self, SERVICE, endless=("JoinWorker",), serves=SERVES)

    async def JoinWorker(
        self,
        request_iterator: AsyncIterator[hosts_pb2.JoinWorkerRequest],
        context: grpc.aio.ServicerContext[hosts_pb2.JoinWorkerRequest, hosts_pb2.JoinWorkerResponse],
    ) -> AsyncIterator[hosts_pb2.JoinWorkerResponse]:
        outgoing: _Outgoing = asyncio.Queue()
        host = self._admit(await _join(request_iterator), outgoing)
        reader = asyncio.create_task(_read(self.hosts, host, request_iterator, outgoing))
        try:
            place, hosts = await self.hosts.place_of(host)
            yield hosts_pb2.JoinWorkerResponse(joined=hosts_pb2.Joined(place=place, hosts=hosts))
            while (response := await outgoing.get()) is not None:
                yield response
            if reader.done():
                reader.result()
        finally:
            self.hosts.left(host)
            reader.cancel()
            # An error of the reader was either raised above already, or gives way to the error that was.
            await asyncio.gather(reader, return_exceptions=True)

    def _admit(self, join: hosts_pb2.Join, outgoing: _Outgoing) -> JoinedHost:
        if join.worker_id != self._config.worker_id:
            raise InvalidRequest(
                f"this is worker {self._config.worker_id!r}, and not {join.worker_id!r}", field="join.worker_id"
            )
        check_host(join.worker_id, join.host, self._role)
        numbers = self.hosts.admit(join.host, join.engine, join.version)
        ranks = {rank: _remote_rank(rank, outgoing) for rank in numbers}
        host = JoinedHost(
            join.host,
            ranks,
            send_record=lambda record: outgoing.put_nowait(wire.record_to_host(record)),
            dismiss=partial(outgoing.put_nowait, None),
        )
        self.hosts.joined(host)
        return host


def _remote_rank(rank: int, outgoing: _Outgoing) -> RemoteRank:
    return RemoteRank(
        lambda data: outgoing.put_nowait(wire.to_rank(rank, data)), partial(outgoing.put_nowait, wire.kill(rank))
    )


async def _join(requests: AsyncIterator[hosts_pb2.JoinWorkerRequest]) -> hosts_pb2.Join:
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            request = await anext(requests, None)
    except TimeoutError as error:
        raise InvalidRequest(f"no join within {JOIN_SECONDS:g} s of the call") from error
    if request is None or request.WhichOneof("message") != "join":
        raise InvalidRequest("the first message of the stream must be join", field="join")
    return request.join


async def _read(
    hosts: JoinedHosts, host: JoinedHost, requests: AsyncIterator[hosts_pb2.JoinWorkerRequest], outgoing: _Outgoing
) -> None:
    """Handle the host's messages; the end of this ends the stream."""
    try:
        async for request in requests:
            _handle(hosts, host, request)
    finally:
        outgoing.put_nowait(None)


def _handle(hosts: JoinedHosts, host: JoinedHost, request: hosts_pb2.JoinWorkerRequest) -> None:
    kind = request.WhichOneof("message")
    if kind == "from_rank":
        _rank(host, request.from_rank.rank).received(request.from_rank.data)
    elif kind == "progress":
        for each in request.progress.ranks:
            _rank(host, each.rank).progressed(wire.progress_of(each))
    elif kind == "record":
        hosts.carry(host.number, request.record)
    elif kind == "stopping":
        hosts.told_to_stop(host)
    elif kind == "ended":
        _rank(host, request.ended.rank).ended(request.ended.status)
    elif kind == "join":
        raise InvalidRequest("a stream has one join, its first message", field="join")


def _rank(host: JoinedHost, number: int) -> RemoteRank:
    rank = host.ranks.get(number)
    if rank is None:
        raise InvalidRequest(f"rank {number} does not lie on host {host.number}", field="rank")
    return rank
