"""A client of KV stores without an engine: blocks of bytes in host memory, offered to a store and fetched from it."""

import asyncio
import select
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from deepmesh.internal.v1 import kvstore_pb2

from kvstore.client import StoreClient
from launcher.process import Child
from mesh.domain import worker_wire
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import WorkerIdentity, WorkerRole
from mesh.event_fd import EventFd
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from transfer.agent import TransferAgent
from transfer.block_macs import Authorship
from transfer.config import TransferConfig
from transfer.events import Event, Fetched, PushEnded
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory
from transfer.ticket import StoreSession, Ticket

READY_SECONDS = 30.0
ATTACH_SECONDS = 10.0
STORE_SECONDS = 120.0
_POLL_SECONDS = 0.002
_DISK_POLL_SECONDS = 0.05


class KvWorker:
    """`memory` is uint8 [layers, blocks, piece_bytes]. The caller decides which of its blocks has which hash."""

    def __init__(
        self,
        layers: int,
        blocks: int,
        piece_bytes: int,
        transfer: TransferConfig | None = None,
        weights: str = "bench",
        secret: bytes | None = None,
        draft_layers: int = 0,
        dtype: str = "bytes",
        scale: float = 1.0,
        layout: str = "bytes",
        place: Callable[[np.ndarray[Any, Any]], KvMemory] = HostMemory,
    ) -> None:
        """secret: if given, the worker vouches for the blocks that it offers and checks those that it fetches.
        draft_layers: how many of the layers, the last ones, are draft layers. place: makes the KV memory of `memory`.
        """
        transfer = transfer or TransferConfig()
        self.memory = np.zeros((layers, blocks, piece_bytes), np.uint8)
        self.namespace = KvNamespace(weights, dtype, layers, layout, scale, draft_layers=draft_layers)
        self.sessions: dict[str, StoreSession] = {}
        self._attached = asyncio.Event()
        self._news = EventFd()
        worker_id = uuid.uuid4().hex
        authorship = None if secret is None else Authorship(secret, worker_id)
        memory, wake = place(self.memory), self._news.set
        self.agent = TransferAgent(memory, self.namespace, transfer, time.monotonic, wake, authorship=authorship)
        self.identity = WorkerIdentity(
            worker_id=worker_id,
            incarnation="first",
            role=WorkerRole.PREFILL,
            endpoint="none:1",
            model="none",
            kv_namespace=self.namespace,
            context_tokens=1 << 20,
            total_blocks=blocks,
            max_requests=1,
            can_prefill=True,
            vocabulary_size=1000,
            worker_class="none",
            max_step_tokens=1024,
            block_bytes=layers * piece_bytes,
            slot_bytes=self.agent.segment_bytes,
        )
        self._blocks: Mapping[bytes, int] = {}
        self._fetches = 0

    def hold(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Say which blocks have which hashes. Offered hashes are pushed from these blocks."""
        self._blocks = dict(zip(hashes, blocks, strict=True))

    def attach_store(self, session: StoreSession) -> None:
        self.sessions[session.store_id] = session
        self.agent.attach_store(session)
        self._attached.set()

    async def attached_to(self, stores: int) -> None:
        """Return once the worker has sessions with this many stores."""
        while len(self.sessions) < stores:
            self._attached.clear()
            await self._attached.wait()

    def detach_store(self, store_id: str) -> None:
        del self.sessions[store_id]
        self.agent.detach_store(store_id)

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        blocks = [self._blocks[block_hash] for block_hash in hashes]
        self.agent.push(ticket, blocks, hashes)
        self.agent.ready(ticket.transfer_id, self.namespace.layers, len(blocks))

    def start_fetch(self, store_id: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> int:
        self._fetches += 1
        self.agent.fetch(self._fetches, store_id, hashes, blocks)
        return self._fetches

    def fetch(self, store_id: str, hashes: Sequence[bytes], blocks: Sequence[int]) -> Fetched:
        """Fetch and wait for the result. No other transfer may be under way."""
        fetch_id = self.start_fetch(store_id, hashes, blocks)
        while True:
            self.wait(None)
            for event in self.agent.events():
                if isinstance(event, Fetched) and event.fetch_id == fetch_id:
                    return event

    def wait(self, seconds: float | None) -> None:
        """Return when the agent has events, or after as many seconds."""
        # `select.select` takes no descriptor above 1,023, which a process of many tests may have.
        news = select.poll()
        news.register(self._news.fileno(), select.POLLIN)
        news.poll(None if seconds is None else seconds * 1000)
        self._news.clear()

    def deliver(self, client: StoreClient) -> list[Event]:
        """Tell the client which of its pushes have ended; returns all other events."""
        others: list[Event] = []
        for event in self.agent.events():
            if isinstance(event, PushEnded):
                client.push_ended(event)
            else:
                others.append(event)
        return others


@asynccontextmanager
async def attached(worker: KvWorker, endpoints: Sequence[str]) -> AsyncIterator[StoreClient]:
    """A store client of the worker, attached to all of these stores. It runs until the block ends."""
    client = StoreClient(endpoints, worker.identity, worker, Channels())
    running = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(ATTACH_SECONDS):
            await worker.attached_to(len(endpoints))
        yield client
    finally:
        running.cancel()
        await asyncio.wait([running])


async def offer_all(
    worker: KvWorker, client: StoreClient, stub: Any, chain: Sequence[bytes], tenant: bytes = b""
) -> None:
    """Offer a chain, push what the store wants, and wait until the store has all of it. stub: the store's gRPC stub."""
    client.offer(chain, tenant)
    request = kvstore_pb2.MatchPrefixRequest(
        kv_namespace=worker_wire.namespace_message(worker.namespace), block_hashes=chain
    )
    async with asyncio.timeout(STORE_SECONDS):
        while (await stub.MatchPrefix(request)).blocks < len(chain):
            worker.deliver(client)
            await asyncio.sleep(_POLL_SECONDS)


async def until_written(stub: Any, blocks: int) -> None:
    """Wait until a store has this many blocks on its disk. stub: the store's gRPC stub."""
    while True:
        status = await stub.GetStatus(kvstore_pb2.GetStatusRequest())
        if any(tier.name == "disk" and tier.used_blocks >= blocks for tier in status.tiers):
            return
        await asyncio.sleep(_DISK_POLL_SECONDS)


@asynccontextmanager
async def store_process(settings: Mapping[str, object]) -> AsyncIterator[str]:
    """`python -m kvstore` on a free port; yields its endpoint."""
    port = free_port()
    overrides = {"server.port": port, **settings}
    options = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    child = Child("kvstore", [sys.executable, "-m", "kvstore", *options], lambda *_: None)
    await child.start()
    try:
        await child.wait_ready(f"127.0.0.1:{port}", Channels(), READY_SECONDS)
        yield f"127.0.0.1:{port}"
    finally:
        await child.stop(5.0)
