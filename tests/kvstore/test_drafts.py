"""Workers with and without drafts share the base layers of blocks through one store, over real UCX."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.kv_store.worker import KvWorker, attached
from kvstore.__main__ import running_store, ucx_agents
from kvstore.client import StoreClient
from kvstore.config import KvStoreConfig
from mesh.blocks import chain_hashes
from mesh.observe.metrics import KVSTORE_DISK_BLOCKS, STORE_OFFERS
from tests.support.metric_values import value_of
from tests.support.slow_memory import LateMemory
from tests.support.stores import store_config
from tests.support.waiting import eventually
from transfer.config import TransferConfig
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory, Pool

BASE_LAYERS, PIECE_BYTES, BLOCKS = 3, 1 << 12, 32
# A segment holds 4 blocks with draft layers, or 5 without.
SMALL_SLOTS = TransferConfig(slot_bytes=1 << 16, slots=4, fetch_seconds=30.0)
CHAIN = chain_hashes(range(64 * 8))
SECRET = b"of all workers of the mesh"
OUTCOMES = ("stored", "unwanted", "known", "failed", "dropped")


def ended_offers() -> dict[str, float]:
    return {outcome: value_of(STORE_OFFERS.labels(outcome)) for outcome in OUTCOMES}


@dataclass
class Worker:
    """Its blocks 0 to 7 hold CHAIN, the same bytes in every worker; what it fetches goes to 16 and on."""

    worker: KvWorker
    client: StoreClient

    async def offer(self, blocks: int, drafts_end: int | None = None) -> None:
        """And push what the store wants, until it has answered all."""
        before = ended_offers()
        offers = 1 if drafts_end in (None, 0) else 2
        self.client.offer(CHAIN[:blocks], drafts_end=drafts_end)

        def over() -> bool:
            self.worker.deliver(self.client)
            return sum(ended_offers().values()) == sum(before.values()) + offers

        await eventually(over)
        assert ended_offers()["failed"] == before["failed"]

    async def fetch(self, blocks: int = len(CHAIN)) -> tuple[int, int]:
        """How many blocks came, and how many of them with draft layers; their bytes are right, others untouched."""
        memory = self.worker.memory
        memory[:, 16:] = 0
        places = range(16, 16 + blocks)
        fetched = await asyncio.to_thread(self.worker.fetch, "s", CHAIN[:blocks], places)
        base, drafts = memory[:BASE_LAYERS], memory[BASE_LAYERS:]
        assert (base[:, 16 : 16 + fetched.blocks] == base[:, : fetched.blocks]).all()
        assert (drafts[:, 16 : 16 + fetched.drafted] == drafts[:, : fetched.drafted]).all()
        assert not base[:, 16 + fetched.blocks :].any() and not drafts[:, 16 + fetched.drafted :].any()
        return fetched.blocks, fetched.drafted


@asynccontextmanager
async def worker_of(
    endpoint: str, draft_layers: int, secret: bytes | None = SECRET, place: Callable[[Pool], KvMemory] = HostMemory
) -> AsyncIterator[Worker]:
    layers = BASE_LAYERS + draft_layers
    worker = KvWorker(layers, BLOCKS, PIECE_BYTES, SMALL_SLOTS, "weights", secret, draft_layers, place=place)
    pieces = np.random.default_rng(0).integers(1, 256, (BASE_LAYERS + 2, len(CHAIN), PIECE_BYTES), np.uint8)
    worker.memory[:, : len(CHAIN)] = pieces[:layers]
    worker.hold(CHAIN, range(len(CHAIN)))
    try:
        async with attached(worker, [endpoint]) as client:
            yield Worker(worker, client)
    finally:
        worker.agent.close()


def config(**changes: Any) -> KvStoreConfig:
    """Room for 24 blocks of 4 layers."""
    room = 24 * 4 * PIECE_BYTES
    return store_config(**{"memory_bytes": room, "transfer": SMALL_SLOTS.model_dump(), **changes})


@asynccontextmanager
async def store_and_workers(
    workers: Sequence[int],
    secret: bytes | None = SECRET,
    place: Callable[[Pool], KvMemory] = HostMemory,
    **changes: Any,
) -> AsyncIterator[list[Worker]]:
    """Workers with these numbers of draft layers, attached in this order."""
    settings = config(**changes)
    async with running_store(settings, ucx_agents(settings.transfer)) as server:
        first, second = workers
        async with (
            worker_of(server.endpoint, first, secret, place) as one,
            worker_of(server.endpoint, second, secret, place) as other,
        ):
            yield [one, other]


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_a_worker_without_drafts_fetches_a_drafting_workers_base_layers(secret: bytes | None) -> None:
    async with store_and_workers([1, 0], secret) as (drafting, plain):
        await drafting.offer(6)
        assert await plain.fetch() == (6, 0)
        assert await drafting.fetch() == (6, 6)


@pytest.mark.parametrize("place", [HostMemory, LateMemory])
@pytest.mark.parametrize("secret", [None, SECRET])
async def test_a_worker_with_drafts_fetches_base_layers_and_adds_drafts(
    secret: bytes | None, place: Callable[[Pool], KvMemory]
) -> None:
    async with store_and_workers([0, 1], secret, place, draft_layers=1) as (plain, drafting):
        await plain.offer(6)
        assert await drafting.fetch() == (6, 0)
        assert await plain.fetch() == (6, 0)
        await drafting.offer(4)
        assert await drafting.fetch() == (6, 4)
        assert await plain.fetch() == (6, 0)
        # The base layers of these are there.
        await plain.offer(8)
        assert await drafting.fetch() == (8, 4)


async def test_what_a_worker_has_without_draft_layers_it_offers_without() -> None:
    async with store_and_workers([1, 1]) as (one, other):
        await one.offer(8, drafts_end=3)
        assert await other.fetch() == (8, 3)
        assert await other.fetch(2) == (2, 2)


async def test_a_store_without_room_for_them_keeps_base_layers() -> None:
    async with store_and_workers([0, 1]) as (plain, drafting):
        await drafting.offer(5)
        assert await drafting.fetch() == (5, 0)
        assert await plain.fetch() == (5, 0)


async def test_workers_with_other_draft_layers_share_base_layers() -> None:
    async with store_and_workers([1, 2]) as (one, two):
        await two.offer(3)
        await one.offer(5)
        assert await one.fetch() == (5, 5)
        assert await two.fetch() == (5, 0)


async def test_draft_layers_come_back_from_disk(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path), "bytes": 1 << 21, "least_uses": 0, "threads": 1}
    written = KVSTORE_DISK_BLOCKS.labels("written")
    before = value_of(written)
    async with store_and_workers([1, 0], disk=disk) as (drafting, plain):
        await drafting.offer(6, drafts_end=4)
        await eventually(lambda: value_of(written) == before + 6)
    async with store_and_workers([1, 0], disk=disk) as (drafting, plain):
        # The file is read while the store serves.
        found: list[tuple[int, int]] = []

        async def all_found() -> bool:
            found.append(await drafting.fetch())
            return found[-1] == (6, 4)

        await eventually(all_found)
        assert await plain.fetch() == (6, 0)
