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
from mesh.errors import DeadlineExceeded, MeshError, NoWorker, NoWorkerYet, Retry, SchedulerUnavailable
from mesh.failures import from_rpc_error
from mesh.identity import Role

REPORTS_KEPT = 1024
RECONNECT_SECONDS = 0.5
RETRY_AFTER_MS = 1000

_log = logging.getLogger("deepmesh.gateway")


class SchedulerLink:
    """A Placer. `run` must be running: it keeps `directory` up to date and sends reports.

    A scheduler that gave no answer is not asked again, as long as the last snapshot serves instead, before it has sent
    a snapshot: it costs one request `answer_seconds`, and the others nothing.
    """

    def __init__(
        self,
        endpoint: str,
        channels: Channels,
        directory: Directory,
        answer_seconds: float,
        place_seconds: float,
        live_streams: Callable[[], dict[str, int]],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._endpoint = endpoint
        self._directory = directory
        self._answer_seconds = answer_seconds
        self._place_seconds = place_seconds
        self._live_streams = live_streams
        self._on_change = on_change
        self._clock = clock
        self._channel = channels.open(endpoint, Role.SCHEDULER)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        # Bounded, the oldest are dropped: a scheduler that is away must not cost memory.
        self._reports: deque[AttemptReport] = deque(maxlen=REPORTS_KEPT)
        self._reported = asyncio.Event()
        # Why the scheduler gave no answer; None while it answers.
        self._silence: MeshError | None = None
        self._silenced = asyncio.Event()

    async def place(self, query: PlacementQuery) -> Placement:
        if self._silence is not None and self._directory.valid(self._clock()):
            return self._place_alone(query, self._silence)
        dispensable = self._find_alone(query) is not None
        seconds = min(self._answer_seconds, self._place_seconds) if dispensable else self._place_seconds
        try:
            response = await self._stub.Place(wire.place_request(query), timeout=seconds)
        except MeshError as error:
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
                tasks.create_task(self._probe_forever())
        finally:
            await self._channel.close()

    def _place_alone(self, query: PlacementQuery, cause: MeshError) -> Placement:
        """Place from the last snapshot, if that is what `cause` calls for. Raises `cause` itself otherwise."""
        silent = _unreachable(cause)
        if silent:
            self._silence = cause
            self._silenced.set()
        if not silent and not isinstance(cause, NoWorkerYet):
            raise cause
        # The snapshot may have changed while the scheduler was asked.
        found = self._find_alone(query)
        if found is not None:
            return found
        if silent and not self._directory.valid(self._clock()):
            raise SchedulerUnavailable(
                f"the scheduler at {self._endpoint} cannot be reached ({cause.message}): retry later",
                retry_after_ms=RETRY_AFTER_MS,
            ) from cause
        raise NoWorker(f"no worker serves {query.model!r} now: retry later", retry_after_ms=RETRY_AFTER_MS) from cause

    def _find_alone(self, query: PlacementQuery) -> Placement | None:
        """Where the last snapshot has room for the request; None if it has none, or is too old."""
        if not self._directory.valid(self._clock()):
            return None
        found = self._directory.least_loaded(query.model, query.avoid, self._live_streams())
        return None if found is None else Placement(*found)

    async def _probe_forever(self) -> None:
        """Ask a silent scheduler for a snapshot until it sends one: one that was frozen keeps its streams open."""
        while await self._silenced.wait():
            if await self._answers():
                self._heard()
            else:
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _answers(self) -> bool:
        call = self._stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest(), timeout=self._place_seconds)
        try:
            return isinstance(await call.read(), scheduler_pb2.WatchWorkersResponse)
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()

    def _heard(self) -> None:
        self._silence = None
        self._silenced.clear()

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
                self._heard()
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
