"""A rank process and a KV store in this one, over UCX: offered blocks are pushed, and fetched by another rank."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from msgspec.structs import replace

from engine.oracle.tokens import oracle_tokens
from mesh.blocks import chain_hashes
from mesh.domain.targets import StoreTarget
from tests.support.engines import VOCABULARY, Transcript, oracle_config, prompt_of, submit_of
from tests.support.kept_spans import kept_spans
from tests.support.rank_store import RankStore
from tests.support.ranks import running_rank, until_an_end
from tests.support.waiting import eventually
from transfer.config import TransferConfig
from worker.ranks.client import RankClient

TRANSFER = TransferConfig(slot_bytes=1 << 16, slots=4, fetch_seconds=10.0)
BLOCKS = 200
PROMPT = prompt_of(64 * BLOCKS + 10)
HASHES = chain_hashes(PROMPT)


def store_of(client: RankClient, known: int) -> RankStore:
    return RankStore(client.ready.namespace, HASHES, known, 512, TRANSFER)


def rank(**settings: Any) -> AbstractAsyncContextManager[RankClient]:
    return running_rank(oracle_config(total_blocks=400, transfer=TRANSFER, **settings))


async def run(client: RankClient, fetch: StoreTarget | None = None) -> Transcript:
    """Generate after the prompt."""
    client.submit(submit_of(1, PROMPT, 20, fetch=fetch))
    return await until_an_end(client)


@pytest.mark.parametrize("mappable", [False, True])
async def test_what_one_rank_offers_another_fetches(mappable: bool) -> None:
    async with rank() as first, rank() as second:
        store = store_of(first, known=BLOCKS)
        try:
            await run(first)
            landed, pushed = await store.take_offer(first)
            assert landed.size_bytes == pushed.size_bytes == BLOCKS * 512
            second.attach_store(store.session(1, mappable))
            transcript = await run(second, StoreTarget("store", BLOCKS))
            assert transcript.token_ids[1] == oracle_tokens(PROMPT, 20, VOCABULARY)
            assert transcript.cached_tokens[1] == 64 * BLOCKS
            assert ("mapped" in store.agent.counters().sent_bytes) == mappable
            # The sender learns of the end after the receiver.
            await eventually(lambda: store.agent.counters().open_pushes == 0)
        finally:
            store.agent.close()


async def test_the_store_answers_under_the_asking_requests_span() -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with rank() as client:
        store = store_of(client, known=0)
        try:
            client.attach_store(store.session(1))
            submit = submit_of(1, PROMPT, 1, fetch=StoreTarget("store", BLOCKS))
            submit.request = replace(submit.request, traceparent=traceparent)
            with kept_spans() as spans:
                client.submit(submit)
                await until_an_end(client)
                # The store ends its span on a thread of its own, when it has sent what the rank waits for.
                await eventually(lambda: "kvstore.fetch" in spans)
                parent = spans["kvstore.fetch"].parent
            assert parent is not None and parent.trace_id == 0x4BF92F3577B34DA6A3CE929D0E0E4736
            assert parent.span_id != 0x00F067AA0BA902B7
        finally:
            store.agent.close()


async def test_a_rank_computes_what_the_store_lacks() -> None:
    async with rank() as first, rank() as second:
        store = store_of(first, known=70)
        try:
            await run(first)
            await store.take_offer(first)
            second.attach_store(store.session(1))
            transcript = await run(second, StoreTarget("store", BLOCKS))
            assert transcript.token_ids[1] == oracle_tokens(PROMPT, 20, VOCABULARY)
            assert transcript.cached_tokens[1] == 64 * 70
        finally:
            store.agent.close()


async def test_a_store_that_is_not_attached_costs_a_rank_nothing() -> None:
    async with rank() as client:
        transcript = await run(client, StoreTarget("store", BLOCKS))
        assert transcript.token_ids[1] == oracle_tokens(PROMPT, 20, VOCABULARY)
        assert transcript.cached_tokens[1] == 0
