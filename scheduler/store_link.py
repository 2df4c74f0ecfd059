"""The link to one KV store over gRPC: asks for its status every second and how much of a prompt it holds, and notices
when it announces its stop.
"""

import asyncio
import logging
from collections.abc import Sequence

import grpc
from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.cancellation import pause
from mesh.domain import worker_wire
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.targets import StoreTarget
from mesh.errors import MeshError, ShuttingDown
from mesh.probe import READINESS
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.identity import Role
from scheduler.config import StoreLinkConfig
from scheduler.stores import StoreStatus, Tier

STATUS_SECONDS = 2.0
MAX_TIERS = 8

log = logging.getLogger(__name__)


class PolledStore:
    """A Store. `run` must be running: a store is asked for matches only while it answers status calls."""

    def __init__(self, endpoint: str, config: StoreLinkConfig, channels: Channels) -> None:
        self.endpoint = endpoint
        self.status: StoreStatus | None = None
        self._config = config
        self._channel = channels.open(endpoint, Role.KVSTORE)
        self._stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        # Watches the store's health while the store is there.
        self._following: asyncio.Task[bool] | None = None
        # Epoch of the store's process as of the last poll, and the epoch of a process that announced its stop but may
        # still answer.
        self._epoch = ""
        self._stopping: str | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                await self._poll()
                await pause(self._config.poll_seconds)
        finally:
            if self._following is not None:
                self._following.cancel()
            await self._channel.close()

    async def match(self, namespace: KvNamespace, chain: Sequence[bytes]) -> StoreTarget | None:
        request = kvstore_pb2.MatchPrefixRequest(
            kv_namespace=worker_wire.namespace_message(namespace), block_hashes=chain
        )
        try:
            response = await self._stub.MatchPrefix(request, timeout=self._config.match_ms / 1000)
        except MeshError as error:
            log.debug("no match", extra={"fields": {"store": self.endpoint, "why": error.message}})
            return None
        blocks, disk_blocks = min(response.blocks, len(chain)), response.disk_blocks
        return StoreTarget(response.store_id, blocks, min(blocks, disk_blocks)) if blocks else None

    async def _poll(self) -> None:
        was_there = self.status is not None
        try:
            response = await self._stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)
            if response.epoch == self._stopping:
                return
            self.status, self._epoch = _status(response), response.epoch
        except MeshError as error:
            self.status = None
            if was_there and not await self._has_stopped():
                log.warning("KV store lost", extra={"fields": {"store": self.endpoint, "why": error.message}})
        if self.status is not None and not was_there:
            log.info("KV store found", extra={"fields": {"store": self.endpoint, "id": self.status.store_id}})
        if self.status is not None and (self._following is None or self._following.done()):
            self._following = asyncio.create_task(self._forget_when_it_stops(self._epoch))

    async def _has_stopped(self) -> bool:
        """Whether a store that does not answer has announced its stop; waits a little, since the announcement may be
        late.
        """
        assert self._following is not None
        await asyncio.wait({self._following}, timeout=STATUS_SECONDS)
        return self._following.done() and self._following.result()

    async def _forget_when_it_stops(self, epoch: str) -> bool:
        """Watch the store until it announces its stop, and then forget it. False if the connection ends first: `_poll`
        notices a store that was killed.
        """
        if not await self._says_that_it_stops():
            return False
        self._stopping = epoch
        if self._epoch == epoch:
            self.status = None
        log.info("KV store stops", extra={"fields": {"store": self.endpoint}})
        return True

    async def _says_that_it_stops(self) -> bool:
        ready = False
        try:
            async for answer in self._health.Watch(health_pb2.HealthCheckRequest(service=READINESS)):
                was_ready, ready = ready, answer.status == health_pb2.HealthCheckResponse.SERVING
                if was_ready and not ready:
                    return True
        except grpc.aio.AioRpcError as error:
            return isinstance(from_rpc_error(error), ShuttingDown)
        return False


def _status(message: kvstore_pb2.GetStatusResponse) -> StoreStatus:
    """Raises InvalidRequest."""
    worker_wire.check_name("store_id", message.store_id)
    tiers = tuple(
        Tier(tier.name, tier.total_blocks, tier.used_blocks, tier.block_bytes) for tier in message.tiers[:MAX_TIERS]
    )
    return StoreStatus(
        store_id=message.store_id,
        tiers=tiers,
        lookups=message.lookups,
        hits=message.hits,
        attached_workers=message.attached_workers,
        transfers=worker_wire.transfers(message.transfers),
    )
