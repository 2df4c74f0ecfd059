"""One KV store over gRPC: its status every second, and what it holds of a prompt."""

import asyncio
import logging
from collections.abc import Sequence

from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc

from mesh.channel import Channels
from mesh.domain import worker_wire
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import KvNamespace
from mesh.errors import MeshError
from mesh.identity import Role
from scheduler.config import StoreLinkConfig
from scheduler.stores import StoreStatus, Tier

STATUS_SECONDS = 2.0
MAX_TIERS = 8

log = logging.getLogger(__name__)


class StoreLink:
    """A Store. `run` must be running: a store is asked for matches only while it answers status calls."""

    def __init__(self, endpoint: str, config: StoreLinkConfig, channels: Channels) -> None:
        self.endpoint = endpoint
        self.status: StoreStatus | None = None
        self._config = config
        self._channel = channels.open(endpoint, Role.KVSTORE)
        self._stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._poll()
                await asyncio.sleep(self._config.poll_seconds)
        finally:
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
            self.status = _status(response)
        except MeshError as error:
            self.status = None
            if was_there:
                log.warning("KV store lost", extra={"fields": {"store": self.endpoint, "why": error.message}})
        if self.status is not None and not was_there:
            log.info("KV store found", extra={"fields": {"store": self.endpoint, "id": self.status.store_id}})


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
