"""A KV store's gRPC side without a store: it answers matches and its status as a test says."""

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc, workers_pb2

from mesh.config import ServerConfig
from mesh.errors import EndpointUnavailable
from mesh.rpc.server import MeshServer, Registration


@dataclass
class FakeStore(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Tests set how many blocks it holds and how long it takes to answer, and read the queries."""

    store_id: str = "store-0"
    blocks: int = 0
    match_seconds: float = 0.0
    # Another store, which a shared index names instead of this one.
    elsewhere: str | None = None
    # Whether its status call fails.
    fails: bool = False
    queries: list[kvstore_pb2.MatchPrefixRequest] = field(default_factory=list)

    epoch: str = ""

    def server(self, port: int = 0) -> MeshServer:
        """A new server. To its callers each looks like another process of this store."""
        self.epoch = uuid.uuid4().hex
        add = kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server
        config = ServerConfig(port=port, drain_seconds=0)
        return MeshServer(config, "fake store", [Registration(add, self, "deepmesh.internal.v1.KvStoreService")])

    async def MatchPrefix(
        self, request: kvstore_pb2.MatchPrefixRequest, context: Any
    ) -> kvstore_pb2.MatchPrefixResponse:
        self.queries.append(request)
        await asyncio.sleep(self.match_seconds)
        blocks = min(self.blocks, len(request.block_hashes))
        return kvstore_pb2.MatchPrefixResponse(
            blocks=blocks, epoch=self.epoch, store_id=self.elsewhere or self.store_id
        )

    async def GetStatus(self, request: kvstore_pb2.GetStatusRequest, context: Any) -> kvstore_pb2.GetStatusResponse:
        if self.fails:
            raise EndpointUnavailable("it has no status")
        tier = kvstore_pb2.TierStatus(name="memory", total_blocks=100, used_blocks=7, block_bytes=4096)
        transfers = workers_pb2.TransferStatus(received_bytes={"tcp": 5})
        return kvstore_pb2.GetStatusResponse(
            store_id=self.store_id,
            epoch=self.epoch,
            tiers=[tier],
            lookups=3,
            hits=2,
            attached_workers=1,
            transfers=transfers,
        )
