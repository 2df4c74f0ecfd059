"""The gateway's link to the scheduler: placements, outcomes, snapshots of the registry; and placement without it."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from gateway import wire
from gateway.placement import AttemptReport, Placement, PlacementQuery
from gateway.workers import Directory
from mesh.channel import Channels
from mesh.errors import DeadlineExceeded, MeshError, NoWorker, Retry, SchedulerUnavailable
from mesh.failures import from_rpc_error

REPORTS_KEPT = 1024
RECONNECT_SECONDS = 0.5
RETRY_AFTER_MS = 1000

_log = logging.getLogger("deepmesh.gateway")


class SchedulerLink:
    """A Placer. `run` must be running: it keeps `directory` up to date and sends reports."""

    def __init__(
        self,
        endpoint: str,
        channels: Channels,
        directory: Directory,
        place_seconds: float,
        live_streams: Callable[[], dict[str, int]],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self._directory = directory
        self._place_seconds = place_seconds
        self._live_streams = live_streams
        self._on_change = on_change
        self._clock = clock
        self._channel = channels.open(endpoint)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        # Bounded, the oldest are dropped: a scheduler that is away must not cost memory.
        self._reports: deque[AttemptReport] = deque(maxlen=REPORTS_KEPT)
        self._reported = asyncio.Event()

    async def place(self, query: PlacementQuery) -> Placement:
        try:
            response = await self._stub.Place(wire.place_request(query), timeout=self._place_seconds)
        except MeshError as error:
            if not _unreachable(error):
                raise
            return self._place_alone(query, error)
        return wire.placement(response)

    def report(self, report: AttemptReport) -> None:
        self._reports.append(report)
        self._reported.set()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_forever())
                tasks.create_task(self._send_reports())
                tasks.create_task(self._expire_forever())
        finally:
            await self._channel.close()

    def _place_alone(self, query: PlacementQuery, cause: MeshError) -> Placement:
        if not self._directory.valid(self._clock()):
            raise SchedulerUnavailable(
                f"the scheduler at {self._endpoint} cannot be reached ({cause.message}): retry later",
                retry_after_ms=RETRY_AFTER_MS,
            ) from cause
        found = self._directory.least_loaded(query.model, query.avoid, self._live_streams())
        if found is None:
            raise NoWorker(f"no worker serves {query.model!r} now: retry later", retry_after_ms=RETRY_AFTER_MS)
        return Placement(*found)

    async def _watch_forever(self) -> None:
        while True:
            try:
                await self._watch()
            except grpc.aio.AioRpcError as error:
                why = from_rpc_error(error).message
                _log.debug("no registry", extra={"fields": {"scheduler": self._endpoint, "why": why}})
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _watch(self) -> None:
        call = self._stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        snapshots = 0
        try:
            # gRPC gives None for what it cannot read.
            while isinstance(response := await call.read(), scheduler_pb2.WatchWorkersResponse):
                if not snapshots:
                    self._directory.begin_watch(self._clock())
                snapshots += 1
                lease_seconds = response.lease.ToMilliseconds() / 1000
                self._directory.update(wire.workers(response), lease_seconds, self._clock())
                self._on_change()
        finally:
            call.cancel()
            if snapshots:
                self._directory.end_watch(self._clock())

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(RECONNECT_SECONDS)
            if self._directory.expire(self._clock()):
                self._on_change()

    async def _send_reports(self) -> None:
        while await self._reported.wait():
            self._reported.clear()
            while self._reports:
                request = wire.outcome_request(self._reports.popleft())
                try:
                    await self._stub.ReportOutcome(request, timeout=self._place_seconds)
                except MeshError as error:
                    _log.debug("outcome not reported", extra={"fields": {"why": error.message}})


def _unreachable(error: MeshError) -> bool:
    """Whether the scheduler gave no answer. NoWorker is one: the scheduler knows no worker."""
    return isinstance(error, DeadlineExceeded) or (error.retry is Retry.THIS_CALL and not isinstance(error, NoWorker))
