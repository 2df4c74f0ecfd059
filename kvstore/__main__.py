"""`python -m kvstore --config configs/kvstore.yaml`"""

import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from deepmesh.internal.v1 import kvstore_pb2_grpc

from kvstore.center import Center
from kvstore.config import KvStoreConfig
from kvstore.disk.tier import prepare_directory
from kvstore.index import Index
from kvstore.memory_index import MemoryIndex
from kvstore.redis_index import RedisIndex
from kvstore.service import KvStoreServicer, OpenStore
from kvstore.slab import OpenAgent
from kvstore.store_memory import StoreMemory
from mesh.background import background
from mesh.domain.kv_identity import KvNamespace
from mesh.errors import IndexUnavailable
from mesh.launch import launch
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import server_tls
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.fetch.lookup_server import LookupHandler
from transfer.ucx_log import UcxLog

SERVICE = "deepmesh.internal.v1.KvStoreService"
WORKERS = (Role.PREFILL, Role.DECODE)
SERVES = {
    "AttachWorker": WORKERS,
    "Offer": WORKERS,
    "ConfirmOffer": WORKERS,
    "WithdrawOffer": WORKERS,
    "MatchPrefix": (Role.SCHEDULER,),
    "GetStatus": (Role.SCHEDULER, Role.OPERATOR),
}
log = logging.getLogger(__name__)


def open_index(config: KvStoreConfig, store_id: str, epoch: str) -> Index:
    if config.index.redis_url is None:
        return MemoryIndex(store_id, epoch)
    return RedisIndex(config.index, store_id, epoch)


def ucx_agents(config: TransferConfig, opened: Callable[[], object] = lambda: None) -> OpenAgent:
    """A function that opens an agent over memory of this process.

    `opened` is called once UCX has started; a store opens only one agent in its life.
    """

    def open_agent(
        memory: StoreMemory, namespace: KvNamespace, lookups: LookupHandler, wake: Callable[[], None]
    ) -> TransferAgent:
        agent = TransferAgent(memory, namespace, config, time.monotonic, wake, lookups)
        opened()
        return agent

    return open_agent


@asynccontextmanager
async def running_store(config: KvStoreConfig, open_agent: OpenAgent) -> AsyncIterator[MeshServer]:
    """A ready store, until the block ends. Raises ConfigError."""
    if config.disk.path is not None:
        prepare_directory(config.disk.path)
    servicer, epoch = KvStoreServicer(), uuid.uuid4().hex
    add = kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server
    registration = Registration(add, servicer, SERVICE, serves=SERVES)
    async with MeshServer(config.server, "kvstore", [registration], server_tls(config.security.tls)) as server:
        store_id = config.store_id or server.endpoint
        index = open_index(config, store_id, epoch)
        center = Center(config, store_id, index, open_agent, time.monotonic)
        servicer.open(OpenStore(center, store_id, epoch))
        try:
            async with background(center.run()):
                await server.ready()
                fields = {"id": store_id, "epoch": epoch, "endpoint": server.endpoint}
                log.info("KV store ready", extra={"fields": fields})
                try:
                    yield server
                finally:
                    await server.drain()
        finally:
            center.close()
            with suppress(IndexUnavailable):
                await index.close()


async def serve(config: KvStoreConfig) -> None:
    """Run the store until a signal."""
    agents = ucx_agents(config.transfer.listening_on(config.server.host), UcxLog)
    async with running_store(config, agents) as server:
        await server.until_signal()


if __name__ == "__main__":
    sys.exit(launch("kvstore", KvStoreConfig, serve))
