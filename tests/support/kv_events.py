"""A subscriber's account of a worker's KV blocks, and the worker's service of events on a port of its own."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from deepmesh.v1 import kv_events_pb2, kv_events_pb2_grpc

from mesh.config import ServerConfig
from mesh.rpc.server import MeshServer
from worker.events.service import KvEventsServicer
from worker.ranks.host import RankHost


@dataclass
class Mirror:
    """What a subscriber knows. `apply` asserts that no batch is missing."""

    # Blocks by rank and medium.
    held: dict[tuple[int, str], set[bytes]] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)
    tokens: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    roots: dict[bytes, bytes] = field(default_factory=dict)
    incarnation: str = ""
    sequence: int = 0
    # Whether further parts of a snapshot follow.
    more: bool = False
    snapshots: int = 0

    def apply(self, batch: kv_events_pb2.SubscribeResponse) -> None:
        assert batch.snapshot or (batch.sequence == self.sequence + 1 and not self.more)
        self.incarnation, self.sequence, self.more = batch.incarnation, batch.sequence, batch.more
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "all_blocks_cleared":
                self.held.clear()
                self.snapshots += 1
            elif kind == "block_removed":
                place = batch.data_parallel_rank, event.block_removed.medium
                self.held.setdefault(place, set()).difference_update(event.block_removed.block_hashes)
            else:
                self._store(batch.data_parallel_rank, event.block_stored)

    def _store(self, rank: int, stored: kv_events_pb2.BlockStored) -> None:
        self.held.setdefault((rank, stored.medium), set()).update(stored.block_hashes)
        before = stored.parent_block_hash
        for index, content in enumerate(stored.block_hashes):
            self.parents[content], before = before, content
            self.roots[content] = stored.cache_root
            start = index * stored.block_size
            self.tokens[content] = tuple(stored.token_ids[start : start + stored.block_size])

    def not_empty(self) -> dict[tuple[int, str], set[bytes]]:
        return {place: blocks for place, blocks in self.held.items() if blocks}

    def everywhere(self) -> set[bytes]:
        return set().union(*self.held.values())

    async def follow(self, call: AsyncIterator[kv_events_pb2.SubscribeResponse], blocks: Iterable[bytes]) -> None:
        """Read until all of these blocks are held."""
        wanted = set(blocks)
        while self.more or not wanted <= self.everywhere():
            self.apply(await anext(call))


@asynccontextmanager
async def served_events(host: RankHost, servicer: KvEventsServicer) -> AsyncIterator[str]:
    """The endpoint of the service."""
    servicer.open(host)
    async with MeshServer(ServerConfig(), "decode", [servicer.registration]) as server:
        await server.ready()
        yield server.endpoint


@asynccontextmanager
async def events_of(host: RankHost, servicer: KvEventsServicer) -> AsyncIterator[Any]:
    """Two stubs of the service over loopback, each with its own connection: who reads nothing holds up all calls of
    one.
    """
    own = (("grpc.use_local_subchannel_pool", 1),)
    async with (
        served_events(host, servicer) as endpoint,
        grpc.aio.insecure_channel(endpoint, options=own) as first,
        grpc.aio.insecure_channel(endpoint, options=own) as second,
    ):
        yield tuple(kv_events_pb2_grpc.KvEventsServiceStub(channel) for channel in (first, second))
