"""A rank process and a KV store in this one, over UCX: offered blocks are pushed, and fetched by another rank."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from engine.client import RankClient
from engine.messages import Fetch, StepResult
from engine.oracle import oracle_tokens
from mesh.blocks import chain_hashes
from mesh.workers import KvNamespace
from tests.support.engines import VOCABULARY, Transcript, oracle_config, prompt_of, submit_of
from tests.support.transfer_peer import KnownChains
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.events import Granted, Landed, PushEnded, SegmentSent
from transfer.host_memory import HostMemory
from transfer.ticket import StoreSession

TRANSFER = TransferConfig(slot_bytes=1 << 16, slots=4, fetch_seconds=10.0)
BLOCKS = 200
PROMPT = prompt_of(64 * BLOCKS + 10)
HASHES = chain_hashes(PROMPT)


class Store:
    """One chain's blocks. `known` of them can be fetched."""

    def __init__(self, namespace: KvNamespace, known: int) -> None:
        slab = np.zeros((1, BLOCKS, 512), np.uint8)
        chains = KnownChains(HASHES[:known], range(known))
        self._namespace = namespace
        self.agent = TransferAgent(HostMemory(slab), namespace, TRANSFER, time.monotonic, lambda: None, chains)

    def session(self, session_id: int) -> StoreSession:
        """A worker's."""
        key = session_id.to_bytes(32, "big")
        self.agent.open_session(session_id, key)
        return StoreSession("store", "epoch", self.agent.address, session_id, key, self._namespace)

    async def take_offer(self, client: RankClient) -> tuple[Landed, PushEnded]:
        """Have a rank push all of the chain's blocks."""
        ticket = self.agent.open_landing(range(BLOCKS), 0, 0, 10.0)
        client.push_offer(ticket, HASHES)
        landed = asyncio.create_task(self._until_landed(client))
        async for message in client.results:
            if isinstance(message, SegmentSent):
                self.agent.pushed(message.digest)
            elif isinstance(message, PushEnded):
                return await landed, message
        raise AssertionError("the rank has gone")

    async def _until_landed(self, client: RankClient) -> Landed:
        while True:
            for event in self.agent.events():
                if isinstance(event, Granted):
                    client.grant(event.transfer_id, event.segment)
                elif isinstance(event, Landed):
                    return event
            await asyncio.sleep(0.005)


@asynccontextmanager
async def rank(**settings: Any) -> AsyncIterator[RankClient]:
    client = await RankClient.start(oracle_config(total_blocks=400, transfer=TRANSFER, **settings))
    try:
        yield client
    finally:
        await client.close(grace_seconds=2.0)


async def run(client: RankClient, fetch: Fetch | None = None) -> Transcript:
    """Generate after the prompt."""
    client.submit(submit_of(1, PROMPT, 20, fetch=fetch))
    transcript = Transcript()
    async for message in client.results:
        assert isinstance(message, StepResult)
        transcript.take(message)
        if transcript.ends:
            return transcript
    raise AssertionError("the rank has gone")


async def test_what_one_rank_offers_another_fetches() -> None:
    async with rank() as first, rank() as second:
        store = Store(first.ready.namespace, known=BLOCKS)
        try:
            await run(first)
            landed, pushed = await store.take_offer(first)
            assert landed.size_bytes == pushed.size_bytes == BLOCKS * 512
            second.attach_store(store.session(1))
            transcript = await run(second, Fetch("store", BLOCKS))
            assert transcript.token_ids[1] == oracle_tokens(PROMPT, 20, VOCABULARY)
            assert transcript.cached_tokens[1] == 64 * BLOCKS
            assert store.agent.counters().open_pushes == 0
        finally:
            store.agent.close()


async def test_a_rank_computes_what_the_store_lacks() -> None:
    async with rank() as first, rank() as second:
        store = Store(first.ready.namespace, known=70)
        try:
            await run(first)
            await store.take_offer(first)
            second.attach_store(store.session(1))
            transcript = await run(second, Fetch("store", BLOCKS))
            assert transcript.token_ids[1] == oracle_tokens(PROMPT, 20, VOCABULARY)
            assert transcript.cached_tokens[1] == 64 * 70
        finally:
            store.agent.close()


async def test_a_store_that_is_not_attached_costs_a_rank_nothing() -> None:
    async with rank() as client:
        transcript = await run(client, Fetch("store", BLOCKS))
        assert transcript.token_ids[1] == oracle_tokens(PROMPT, 20, VOCABULARY)
        assert transcript.cached_tokens[1] == 0
