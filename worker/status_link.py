"""The stream on which the scheduler hears of this worker: it comes back for ever, and its absence disturbs nobody."""

import asyncio
import logging
from contextlib import suppress
from typing import Any, NoReturn

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from mesh.backoff import Backoff
from mesh.channel import open_channel
from mesh.domain.workers import WorkerIdentity
from mesh.errors import MeshError, SchedulerUnavailable
from mesh.failures import from_rpc_error
from worker import wire
from worker.status_report import StatusReport

log = logging.getLogger(__name__)

# Without an answer for so long the scheduler is frozen or gone.
ANSWER_SECONDS = 10.0
HEARTBEATS_A_LEASE = 3


class StatusLink:
    """Reports to one scheduler: at once, after changes, and three times a lease at the least."""

    def __init__(self, endpoint: str, identity: WorkerIdentity, report: StatusReport, interval_seconds: float) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._report = report
        self._interval_seconds = interval_seconds
        self._backoff = Backoff(log)
        self._connected = False
        self._told_draining = asyncio.Event()

    async def run(self) -> None:
        """Report until cancelled."""
        async with open_channel(self._endpoint) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            while True:
                try:
                    await self._follow(stub.ReportStatus())
                except MeshError as error:
                    self._connected = False
                    await self._backoff.failed(f"not reporting to the scheduler at {self._endpoint}", error)

    async def told_draining(self, seconds: float) -> None:
        """Return when the scheduler, if there is one, knows that this worker drains, or after that time."""
        if not self._connected:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._told_draining.wait()

    async def _follow(self, call: Any) -> NoReturn:
        """One stream, until it breaks; each message is answered before the next."""
        # A broken stream is noticed at once, and not at the next heartbeat.
        call.add_done_callback(lambda _: self._report.wake())
        try:
            lease_seconds = await self._tell(call, first=True)
            log.info("reporting to the scheduler at %s", self._endpoint)
            self._connected = True
            self._backoff.succeeded()
            while True:
                await asyncio.sleep(self._interval_seconds)
                await self._report.wait(lease_seconds / HEARTBEATS_A_LEASE - self._interval_seconds)
                lease_seconds = await self._tell(call, first=False)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError as error:
            raise SchedulerUnavailable(f"no answer within {ANSWER_SECONDS:g} s") from error
        finally:
            call.cancel()

    async def _tell(self, call: Any, first: bool) -> float:
        """Send what there is to tell; returns the lease in seconds."""
        report = self._report.take(snapshot=first)
        async with asyncio.timeout(ANSWER_SECONDS):
            # Writing on an ended call is a mistake of ours; reading from one says how it ended.
            if not call.done():
                await call.write(wire.status_message(report, self._identity if first else None))
            response = await call.read()
        # gRPC gives None for what it cannot read.
        if not isinstance(response, scheduler_pb2.ReportStatusResponse):
            raise SchedulerUnavailable("the scheduler ended the stream, or sent a malformed message")
        if report.draining:
            self._told_draining.set()
        lease_seconds: float = response.lease.ToNanoseconds() / 1e9
        return lease_seconds
