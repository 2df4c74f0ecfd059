"""KvEventsService: tells subscribers which KV blocks this worker holds."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import asyncio

import grpc
from deepmesh.v1 import kv_events_pb2, kv_events_pb2_grpc

from mesh.errors import ConfigError, NoWorker, Overloaded, SlowClient
from mesh.rpc.identity import Role
from mesh.rpc.server import Registration
from worker.events import wire
from worker.events.config import KvEventsConfig
from worker.ranks.host import RankHost

SERVICE = "deepmesh.v1.KvEventsService"
SERVES = {"Subscribe": (Role.GATEWAY, Role.OPERATOR)}
# A subscriber that has not taken a batch for this long is ended, so that others have its place.
STUCK_SECONDS = 30.0


class KvEventsServicer(kv_events_pb2_grpc.KvEventsServiceServicer):
    """Serves nothing until `open`. A subscriber costs a message of memory, however slowly it reads."""

    def __init__(self, config: KvEventsConfig, stuck_seconds: float = STUCK_SECONDS) -> None:
        self._config = config
        self._stuck_seconds = stuck_seconds
        self._host: RankHost | None = None
        self._subscribers = 0

    @property
    def registration(self) -> Registration:
        add = kv_events_pb2_grpc.add_KvEventsServiceServicer_to_server
        return Registration(add, self, SERVICE, ("Subscribe",), SERVES)

    def open(self, host: RankHost) -> None:
        self._host = host

    async def Subscribe(
        self,
        request: kv_events_pb2.SubscribeRequest,
        context: grpc.aio.ServicerContext[kv_events_pb2.SubscribeRequest, kv_events_pb2.SubscribeResponse],
    ) -> None:
        host = self._host
        if not self._config.enabled:
            raise ConfigError("this worker tells no KV events: set kv_events.enabled=true")
        if host is None or host.events is None:
            raise NoWorker("this worker is still loading its model: retry")
        if self._subscribers >= self._config.max_subscribers:
            raise Overloaded(
                f"{self._subscribers} subscribers are the most: raise kv_events.max_subscribers", retry_after_ms=10_000
            )
        worker = host.identity
        from_sequence = request.from_sequence if request.incarnation == worker.incarnation else 0
        self._subscribers += 1
        try:
            async for batch in host.events.batches(from_sequence):
                async with asyncio.timeout(self._stuck_seconds):
                    await context.write(wire.batch_message(batch, worker))
        except TimeoutError:
            raise SlowClient(f"this subscriber has not read for {self._stuck_seconds:g} s: subscribe again") from None
        finally:
            self._subscribers -= 1
