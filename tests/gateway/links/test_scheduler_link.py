"""The end of a link to a scheduler."""

import asyncio
from typing import Any, NoReturn

import grpc
import pytest
from deepmesh.internal.v1 import scheduler_pb2_grpc

from gateway.links.scheduler_link import SchedulerLink
from mesh.domain.placement import AttemptOutcome, AttemptReport
from mesh.errors import MeshError, SchedulerUnavailable
from mesh.rpc.channel import Channels
from tests.support.waiting import PATIENCE_SECONDS, eventually

AWAY = SchedulerUnavailable("none answers")
BROKEN = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


class Losing:
    """Calls that fail as they are cancelled, with their own error, as gRPC's may."""

    def __init__(self, *channel: Any) -> None:
        self.waiting = 0

    async def _fail(self, error: MeshError | grpc.aio.AioRpcError) -> NoReturn:
        self.waiting += 1
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise error from None
        raise AssertionError("the call ended by itself")

    async def ReportOutcome(self, *request: Any, **options: Any) -> NoReturn:
        await self._fail(AWAY)

    def WatchWorkers(self, *request: Any, **options: Any) -> "Losing":
        return self

    async def read(self) -> NoReturn:
        await self._fail(BROKEN)

    def cancel(self) -> None:
        pass


async def test_a_link_ends_although_its_calls_lost_the_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Losing()
    monkeypatch.setattr(scheduler_pb2_grpc, "SchedulerServiceStub", lambda channel: stub)
    link = SchedulerLink("127.0.0.1:1", Channels(), 1.0, lambda link: None)
    running = asyncio.create_task(link.run())
    link.note_silence(AWAY)
    link.report(AttemptReport("r", 0, AttemptOutcome.CANCELLED, 0))
    # The registry, a probe and a report.
    await eventually(lambda: stub.waiting == 3)
    running.cancel()
    await asyncio.wait([running], timeout=PATIENCE_SECONDS)
    assert running.cancelled()
