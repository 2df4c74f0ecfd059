"""The stream on which this worker reports to a scheduler. It is reopened for ever; requests do not depend on it."""

import asyncio
import logging
from contextlib import suppress
from typing import Any

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from mesh.backoff import Backoff
from mesh.domain.workers import WorkerIdentity, WorkerState
from mesh.errors import MeshError, SchedulerUnavailable
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role
from worker import wire
from worker.status_report import StatusReport

log = logging.getLogger(__name__)

# A scheduler that has not answered for this long is frozen or gone.
ANSWER_SECONDS = 10.0
HEARTBEATS_A_LEASE = 3


class StatusLink:
    """Reports to one scheduler: at once after changes, and at least three times a lease."""

    def __init__(
        self,
        endpoint: str,
        identity: WorkerIdentity,
        report: StatusReport,
        interval_seconds: float,
        channels: Channels,
    ) -> None:
        self._endpoint = endpoint
        self._channels = channels
        self._identity = identity
        self._report = report
        self._interval_seconds = interval_seconds
        self._backoff = Backoff(log)
        self._connected = False
        self._draining_reported = asyncio.Event()
        self._left = asyncio.Event()

    async def run(self) -> None:
        """Report until cancelled, or until the worker has left."""
        async with self._channels.open(self._endpoint, Role.SCHEDULER) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while not self._left.is_set():
                try:
                    await self._report_on(stub.ReportStatus())
                except MeshError as error:
                    self._connected = False
                    await self._backoff.failed(f"not reporting to the scheduler at {self._endpoint}", error)

    async def drain_reported(self, seconds: float) -> None:
        """Return once the scheduler, if connected, knows that this worker drains, or after `seconds`."""
        if not self._connected:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining_reported.wait()

    async def leave(self, seconds: float) -> None:
        """Return once the scheduler, if connected, has forgotten this worker, or after `seconds`."""
        if not self._connected:
            return
        self._report.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._left.wait()

    async def _report_on(self, call: Any) -> None:
        """Report on one stream until it breaks or the worker has left; each message is answered before the next is
        sent.
        """
        # Wakes the loop below, so that a broken stream is noticed at once rather than at the next heartbeat.
        call.add_done_callback(lambda _: self._report.wake())
        try:
            lease_seconds = await self._send(call, first=True)
            log.info("reporting to the scheduler at %s", self._endpoint)
            self._backoff.succeeded()
            while not self._left.is_set():
                await asyncio.sleep(self._interval_seconds)
                await self._report.wait(lease_seconds / HEARTBEATS_A_LEASE - self._interval_seconds)
                lease_seconds = await self._send(call, first=False)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError as error:
            raise SchedulerUnavailable(f"no answer within {ANSWER_SECONDS:g} s") from error
        finally:
            call.cancel()

    async def _send(self, call: Any, first: bool) -> float:
        """Send one report; returns the lease in seconds."""
        report = self._report.next_report(snapshot=first)
        async with asyncio.timeout(ANSWER_SECONDS):
            # Writing to an ended call would raise a usage error; reading from it raises the reason for its end.
            if not call.done():
                await call.write(wire.status_message(report, self._identity if first else None))
                # From here on the scheduler may know this worker, even before it answers.
                self._connected = True
            response = await call.read()
        # gRPC returns None for a message that it cannot parse.
        if not isinstance(response, scheduler_pb2.ReportStatusResponse):
            raise SchedulerUnavailable("the scheduler ended the stream, or sent a malformed message")
        if report.state is WorkerState.DRAINING:
            self._draining_reported.set()
        if report.leaving:
            self._left.set()
        lease_seconds: float = response.lease.ToNanoseconds() / 1e9
        return lease_seconds
