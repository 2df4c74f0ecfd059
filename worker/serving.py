"""Runs a worker's process with its server: reports, serves until a signal or the end of its engine, and drains."""

import asyncio
import logging
import time
from typing import Protocol

from mesh.addresses import split_addresses
from mesh.channel import Channels
from mesh.launch import Program
from mesh.server import MeshServer
from worker.config import WorkerConfig
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


async def serve_worker(
    worker: Worker, server: MeshServer, config: WorkerConfig, channels: Channels, change: RoleChange
) -> Program | None:
    """Run a loaded worker until a signal, a change of its role, or the loss or the stop of another host of the worker.
    Returns the program that replaces it, if any.

    Raises EngineFailed if one of its ranks dies first, and what ended its reports to a scheduler.
    """
    identity = worker.host.identity
    links = _status_links(worker.host, config, channels)
    running = asyncio.create_task(worker.run())
    reporting = [asyncio.create_task(link.run()) for link in links]
    signalled = asyncio.create_task(server.until_signal())
    changing = asyncio.create_task(change.wanted.wait())
    parting = asyncio.create_task(worker.host.ranks.until_host_stops())
    await server.ready()
    log.info("worker ready", extra={"fields": {"id": identity.worker_id, "endpoint": identity.endpoint}})
    await asyncio.wait({running, signalled, changing, parting, *reporting}, return_when=asyncio.FIRST_COMPLETED)
    silent = [task for task in reporting if task.done()]
    changes = changing.done() and not (running.done() or signalled.done() or silent)
    what = "worker changes its role" if changes else "worker stops"
    log.info(what, extra={"fields": {"live_requests": worker.live_requests}})
    await server.drain()
    await worker.drain(change.drain_seconds if changes else config.server.drain_seconds)
    drained_at = time.monotonic()
    await asyncio.gather(*(link.drain_reported(FAREWELL_SECONDS) for link in links))
    await asyncio.gather(*(link.leave(FAREWELL_SECONDS) for link in links))
    for task in reporting:
        task.cancel()
    # A signal that arrived meanwhile takes precedence over the change of role.
    following: Program | None = None
    if changes and not (running.done() or signalled.done()):
        released = await worker.host.ranks.release() if change.keeps_ranks else None
        following = change.program(released, drained_at)
    if parting.done() and not (changes or running.done() or signalled.done() or silent):
        worker.host.ranks.part()
        await asyncio.wait({running})
    if running.done():
        kept = worker.host.ranks.kept
        if signalled.done() and parting.done():
            # The whole worker was told to stop, one of its other hosts first.
            log.info("the worker's hosts stop", extra={"fields": {"cause": str(running.exception())}})
        elif kept is None or signalled.done():
            # Raises what ended the worker, if it was not the signal.
            running.result()
        else:
            fields = {"cause": str(running.exception())}
            log.warning("the worker forms again, with the ranks that are left", extra={"fields": fields})
            following = program_again(config, identity.role, kept, server, drained_at)
    running.cancel()
    changing.cancel()
    parting.cancel()
    for task in silent:
        # Schedulers would take a worker that does not report for one that is gone: raises what ended the reports.
        task.result()
    return following


def _status_links(host: RankHost, config: WorkerConfig, channels: Channels) -> list[StatusLink]:
    """A link to each scheduler."""
    first, *others = split_addresses(config.scheduler)
    reports = [(first, host.report), *((endpoint, host.report.follower()) for endpoint in others)]
    return [
        StatusLink(endpoint, host.identity, report, config.status_interval_seconds, channels)
        for endpoint, report in reports
    ]
