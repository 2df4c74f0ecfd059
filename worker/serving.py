"""Runs a worker's process with its server: reports, serves until a signal or the end of its engine, and drains."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from mesh.addresses import split_addresses
from mesh.domain.workers import WorkerRole
from mesh.launch import Program
from mesh.rpc.channel import Channels
from mesh.rpc.server import MeshServer
from worker.config import WorkerConfig
from worker.handover import KeptRanks
from worker.ranks.host import RankHost
from worker.regrouping import program_again
from worker.role_change import RoleChange
from worker.status_link import StatusLink

# How long a stopping worker waits for its scheduler to answer the report that it drains.
FAREWELL_SECONDS = 1.0
log = logging.getLogger(__name__)


class Worker(Protocol):
    @property
    def host(self) -> RankHost: ...

    @property
    def live_requests(self) -> int: ...

    async def run(self) -> None:
        """Run until a rank dies, and raise what ended it."""
        ...

    async def drain(self, seconds: float) -> None:
        """Take nothing new, and give the live requests `seconds` to end."""
        ...


@dataclass(frozen=True, slots=True)
class _Ends:
    """What may end a serving worker: each task is done once that has happened."""

    # A rank died.
    running: asyncio.Task[None]
    signalled: asyncio.Task[None]
    # Another role is wanted.
    changing: asyncio.Task[bool]
    # Another host of the worker stops.
    parting: asyncio.Task[None]
    # The reports to a scheduler failed.
    reporting: list[asyncio.Task[None]]

    @classmethod
    def watched(cls, worker: Worker, server: MeshServer, change: RoleChange, links: Sequence[StatusLink]) -> Self:
        return cls(
            running=asyncio.create_task(worker.run()),
            signalled=asyncio.create_task(server.until_signal()),
            changing=asyncio.create_task(change.wanted.wait()),
            parting=asyncio.create_task(worker.host.ranks.until_host_stops()),
            reporting=[asyncio.create_task(link.run()) for link in links],
        )

    @property
    def stopped(self) -> bool:
        """Whether a rank died or a signal came."""
        return self.running.done() or self.signalled.done()

    async def first(self) -> None:
        await asyncio.wait(
            {self.running, self.signalled, self.changing, self.parting, *self.reporting},
            return_when=asyncio.FIRST_COMPLETED,
        )

    def forget(self) -> None:
        for task in (self.running, self.changing, self.parting):
            task.cancel()


async def serve_worker(
    worker: Worker, server: MeshServer, config: WorkerConfig, channels: Channels, change: RoleChange
) -> Program | None:
    """Run a loaded worker until a signal, a change of its role, or the loss or the stop of another host of the worker.
    Returns the program that replaces it, if any.

    Raises EngineFailed if one of its ranks dies first, and what ended its reports to a scheduler.
    """
    identity, ranks = worker.host.identity, worker.host.ranks
    links = _status_links(worker.host, config, channels)
    ends = _Ends.watched(worker, server, change, links)
    await server.ready()
    log.info("worker ready", extra={"fields": {"id": identity.worker_id, "endpoint": identity.endpoint}})
    await ends.first()
    silent = [task for task in ends.reporting if task.done()]
    changes = ends.changing.done() and not (ends.stopped or silent)
    what = "worker changes its role" if changes else "worker stops"
    log.info(what, extra={"fields": {"live_requests": worker.live_requests}})
    await server.drain()
    await worker.drain(change.drain_seconds if changes else config.server.drain_seconds)
    drained_at = time.monotonic()
    await asyncio.gather(*(link.drain_reported(FAREWELL_SECONDS) for link in links))
    await asyncio.gather(*(link.leave(FAREWELL_SECONDS) for link in links))
    for task in ends.reporting:
        task.cancel()
    # A signal that arrived meanwhile takes precedence over the change of role.
    following: Program | None = None
    if changes and not ends.stopped:
        released = await ranks.release() if change.keeps_ranks else None
        following = change.program(released, drained_at)
    if ends.parting.done() and not (changes or ends.stopped or silent):
        ranks.part()
        await asyncio.wait({ends.running})
    if ends.running.done():
        following = _formed_again(ends, ranks.kept, identity.role, config, server, drained_at) or following
    ends.forget()
    for task in silent:
        # Schedulers would take a worker that does not report for one that is gone: raises what ended the reports.
        task.result()
    return following


def _formed_again(
    ends: _Ends, kept: KeptRanks | None, role: WorkerRole, config: WorkerConfig, server: MeshServer, drained_at: float
) -> Program | None:
    """The program of a worker that lost a rank, with the ranks that are left; None if it was told to stop. Raises what
    ended it if no ranks are left.
    """
    fields = {"cause": str(ends.running.exception())}
    if ends.signalled.done() and ends.parting.done():
        # The whole worker was told to stop, one of its other hosts first.
        log.info("the worker's hosts stop", extra={"fields": fields})
        return None
    if kept is None or ends.signalled.done():
        # Nothing is raised if the signal ended the run.
        ends.running.result()
        return None
    log.warning("the worker forms again, with the ranks that are left", extra={"fields": fields})
    return program_again(config, role, kept, server, drained_at)


def _status_links(host: RankHost, config: WorkerConfig, channels: Channels) -> list[StatusLink]:
    """A link to each scheduler."""
    first, *others = split_addresses(config.scheduler)
    reports = [(first, host.report), *((endpoint, host.report.follower()) for endpoint in others)]
    return [
        StatusLink(endpoint, host.identity, report, config.status_interval_seconds, channels)
        for endpoint, report in reports
    ]
