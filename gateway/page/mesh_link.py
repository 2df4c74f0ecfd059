"""Watches the mesh while someone looks at the page; all viewers share one look."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

import grpc
import msgspec
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from gateway.page import wire
from gateway.page.view import MeshView
from mesh.errors import MeshError
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 2.0
DECISIONS = 30


class MeshLink:
    """The page's link to the scheduler whose address `followed` returns.

    `views` yields the mesh as JSON, about once a second; call `close` at the end.
    """

    def __init__(
        self,
        followed: Callable[[], str],
        channels: Channels,
        live_generations: Callable[[], int],
        received_tokens: Callable[[], int],
        keys: bool,
    ) -> None:
        """`keys`: whether the playground needs an API key."""
        self._followed = followed
        self._channels = channels
        # Open channels, by the scheduler's address.
        self._open: dict[str, grpc.aio.Channel] = {}
        self._live_generations = live_generations
        self._received_tokens = received_tokens
        self._keys = keys
        self._looking: asyncio.Task[bytes] | None = None

    async def close(self) -> None:
        for channel in self._open.values():
            await channel.close()

    async def views(self) -> AsyncGenerator[bytes, None]:
        """Yields views until the caller stops."""
        while True:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look())
            looking = self._looking
            # Shielded: a viewer that leaves must not cancel the look that others wait for.
            yield await asyncio.shield(looking)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> bytes:
        snapshot, decisions, problem = scheduler_pb2.WatchWorkersResponse(), scheduler_pb2.ListDecisionsResponse(), ""
        scheduler = self._scheduler()
        try:
            snapshot = await self._snapshot(scheduler)
            request = scheduler_pb2.ListDecisionsRequest(limit=DECISIONS)
            decisions = await scheduler.ListDecisions(request, timeout=ANSWER_SECONDS)
        except MeshError as error:
            problem = error.message
        view = MeshView(
            time=time.time(),
            problem=problem,
            live=self._live_generations(),
            received_tokens=self._received_tokens(),
            keys=self._keys,
            workers=wire.workers(snapshot.workers),
            stores=[wire.store(each) for each in snapshot.stores],
            decisions=[wire.decision(each) for each in decisions.decisions],
        )
        return msgspec.json.encode(view)

    def _scheduler(self) -> scheduler_pb2_grpc.SchedulerServiceStub:
        endpoint = self._followed()
        if endpoint not in self._open:
            self._open[endpoint] = self._channels.open(endpoint, Role.SCHEDULER)
        return scheduler_pb2_grpc.SchedulerServiceStub(self._open[endpoint])

    async def _snapshot(self, scheduler: scheduler_pb2_grpc.SchedulerServiceStub) -> scheduler_pb2.WatchWorkersResponse:
        """Raises MeshError."""
        watch = scheduler.WatchWorkers(scheduler_pb2.WatchWorkersRequest(), timeout=ANSWER_SECONDS)
        try:
            response = await watch.read()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            watch.cancel()
        # gRPC returns None for a message that it cannot parse.
        if isinstance(response, scheduler_pb2.WatchWorkersResponse):
            return response
        return scheduler_pb2.WatchWorkersResponse()
