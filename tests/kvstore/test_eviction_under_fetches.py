"""A store that is too small for what is offered: whatever a fetch brings while blocks are evicted is right."""

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest

from bench.kv_store.worker import KvWorker, attached, offer_all
from kvstore.__main__ import running_store, ucx_agents
from mesh.blocks import chain_hashes
from mesh.observe.metrics import KVSTORE_EVICTED_BLOCKS
from tests.support.metric_values import value_of
from tests.support.moving_store import LAYERS, PIECE_BYTES, SMALL_SLOTS
from tests.support.slow_memory import LateMemory
from tests.support.stores import store_config, store_stub
from transfer.host_memory import HostMemory
from transfer.memory import KvMemory, Pool

CHAINS, CHAIN_BLOCKS = 40, 6
BLOCKS = CHAINS * CHAIN_BLOCKS
# Room for four chains: one that is read, one whose reader has not confirmed it yet, one that lands, and one that may be
# evicted for it.
ROOM = 4 * CHAIN_BLOCKS * LAYERS * PIECE_BYTES


@pytest.mark.parametrize(
    ("map_stores", "place"),
    [(False, HostMemory), (True, HostMemory), (True, LateMemory)],
    ids=["sent", "mapped", "mapped, later"],
)
async def test_every_block_fetched_while_others_are_evicted_is_right(
    map_stores: bool, place: Callable[[Pool], KvMemory]
) -> None:
    settings = store_config(memory_bytes=ROOM, transfer=SMALL_SLOTS.model_dump())
    transfer = SMALL_SLOTS.model_copy(update={"map_stores": map_stores})
    chains = [chain_hashes(range(1000 * number, 1000 * number + 64 * CHAIN_BLOCKS)) for number in range(CHAINS)]
    writer = KvWorker(LAYERS, BLOCKS, PIECE_BYTES, transfer)
    reader = KvWorker(LAYERS, CHAIN_BLOCKS, PIECE_BYTES, transfer, place=place)
    writer.memory[:] = np.random.default_rng(0).integers(1, 256, writer.memory.shape, np.uint8)
    writer.hold([content for chain in chains for content in chain], range(BLOCKS))
    evicted, draw, offered, fetched = value_of(KVSTORE_EVICTED_BLOCKS), random.Random(0), 0, 0
    async with (
        running_store(settings, ucx_agents(settings.transfer)) as server,
        attached(writer, [server.endpoint]) as client,
        attached(reader, [server.endpoint]),
        store_stub(server.endpoint) as stub,
    ):

        async def offer_all_chains() -> None:
            nonlocal offered
            for chain in chains:
                await offer_all(writer, client, stub, chain)
                offered += 1

        offering = asyncio.create_task(offer_all_chains())
        while not offering.done():
            # One that is there, that is being evicted, or that is on its way.
            number = draw.randrange(max(offered - 5, 0), min(offered + 1, CHAINS))
            found = await asyncio.to_thread(reader.fetch, "s", chains[number], range(CHAIN_BLOCKS))
            assert found.error is None
            right = writer.memory[:, CHAIN_BLOCKS * number :][:, : found.blocks]
            assert (reader.memory[:, : found.blocks] == right).all()
            fetched += found.blocks
        await offering
        assert fetched and value_of(KVSTORE_EVICTED_BLOCKS) - evicted >= BLOCKS - 4 * CHAIN_BLOCKS
    for worker in (writer, reader):
        worker.agent.close()
