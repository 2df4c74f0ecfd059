"""The gateway's link to one scheduler: placements, outcomes, snapshots of its registry."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from gateway.links import wire
from gateway.links.workers import Worker
from mesh.cancellation import check_cancelled, pause
from mesh.domain import placement_wire
from mesh.domain.placement import AttemptReport, Placement, PlacementQuery
from mesh.errors import MeshError
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role

# More than the requests that a gateway may have at once: all their clients may leave together.
REPORTS_KEPT = 16_384
# Reports on their way at once. One at a time took seconds to tell of a thousand clients that left.
REPORTERS = 8
RECONNECT_SECONDS = 0.5

_log = logging.getLogger("deepmesh.gateway")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The registry, as a scheduler last sent it."""

    workers: Sequence[Worker]
    lease_seconds: float


class SchedulerLink:
    """`run` must be running: it updates `snapshot`, sends reports, and probes a scheduler that does not answer.

    Attributes:
        silence: why the scheduler does not answer; None while it does.
        snapshot: the latest one of the open stream of snapshots; None while no stream is open.
    """

    def __init__(
        self, endpoint: str, channels: Channels, probe_seconds: float, on_news: Callable[["SchedulerLink"], None]
    ) -> None:
        """on_news: called when `snapshot` or `silence` has changed."""
        self.endpoint = endpoint
        self.silence: MeshError | None = None
        self.snapshot: Snapshot | None = None
        self._probe_seconds = probe_seconds
        self._on_news = on_news
        self._channel = channels.open(endpoint, Role.SCHEDULER)
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        # Bounded, oldest dropped first: reports for a scheduler that is away must not fill the memory.
        self._reports: deque[AttemptReport] = deque(maxlen=REPORTS_KEPT)
        self._reported = asyncio.Event()
        self._silenced = asyncio.Event()

    async def place(self, query: PlacementQuery, seconds: float) -> Placement:
        """Raises the scheduler's error, or why it did not answer within `seconds`."""
        return placement_wire.placement(await self._stub.Place(placement_wire.query_message(query), timeout=seconds))

    def report(self, report: AttemptReport) -> None:
        self._reports.append(report)
        self._reported.set()

    def note_silence(self, cause: MeshError) -> None:
        """Note that the scheduler did not answer; `run` then asks it for a snapshot until it sends one."""
        self.silence = cause
        self._silenced.set()
        self._on_news(self)

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_forever())
                for _ in range(REPORTERS):
                    tasks.create_task(self._send_reports())
                tasks.create_task(self._probe_forever())
        finally:
            await self._channel.close()

    async def _probe_forever(self) -> None:
        """Ask a silent scheduler until it answers. This is needed for a frozen one: its streams stay open but carry
        nothing.
        """
        while await self._silenced.wait():
            if await self._answers():
                self._heard()
                self._on_news(self)
            else:
                await pause(RECONNECT_SECONDS)

    async def _answers(self) -> bool:
        call = self._stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest(), timeout=self._probe_seconds)
        try:
            return isinstance(await call.read(), scheduler_pb2.WatchWorkersResponse)
        except grpc.aio.AioRpcError:
            return False
        finally:
            call.cancel()

    def _heard(self) -> None:
        self.silence = None
        self._silenced.clear()

    async def _watch_forever(self) -> None:
        while True:
            try:
                await self._watch()
            except grpc.aio.AioRpcError as error:
                why = from_rpc_error(error).message
                _log.debug("no registry", extra={"fields": {"scheduler": self.endpoint, "why": why}})
            await pause(RECONNECT_SECONDS)

    async def _watch(self) -> None:
        call = self._stub.WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        try:
            # gRPC returns None for a message that it cannot parse.
            while isinstance(response := await call.read(), scheduler_pb2.WatchWorkersResponse):
                self._heard()
                self.snapshot = Snapshot(wire.workers(response), response.lease.ToMilliseconds() / 1000)
                self._on_news(self)
        finally:
            call.cancel()
            if self.snapshot is not None:
                self.snapshot = None
                self._on_news(self)

    async def _send_reports(self) -> None:
        while await self._reported.wait():
            self._reported.clear()
            while self._reports:
                request = placement_wire.report_message(self._reports.popleft())
                try:
                    await self._stub.ReportOutcome(request, timeout=self._probe_seconds)
                except MeshError as error:
                    check_cancelled()
                    _log.debug("outcome not reported", extra={"fields": {"why": error.message}})
