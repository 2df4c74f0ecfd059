"""The account of blocks, and what subscribers make of its events, however slowly they read."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.messages import StepResult
from mesh.blocks import BLOCK_TOKENS, chain_hashes
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.workers import WorkerLoad
from tests.support.kv_events import Mirror
from tests.support.store_agent import worker_identity
from worker.events import kv_events
from worker.events.batch import HOST, POOL, Batch, Cleared, Removed, Stored
from worker.events.config import KvEventsConfig
from worker.events.kv_events import KvEvents
from worker.events.wire import batch_message

CHAIN = chain_hashes(range(64 * 8))
PARENTS = [b"", *CHAIN[:-1]]
RANKS = 2


def events_of(**settings: Any) -> KvEvents:
    return KvEvents(KvEventsConfig(**settings), RANKS, clock=lambda: 5.0)


def step(stored: list[int] | None = None, removed: list[int] | None = None, **tiers: list[int]) -> StepResult:
    """A rank's report on blocks of CHAIN, by their indices."""
    stored = stored or []
    return StepResult(
        0,
        [],
        WorkerLoad(),
        stored_blocks=[CHAIN[index] for index in stored],
        stored_parents=[PARENTS[index] for index in stored],
        removed_blocks=[CHAIN[index] for index in removed or []],
        hosted_blocks=[CHAIN[index] for index in tiers.get("hosted", [])],
        unhosted_blocks=[CHAIN[index] for index in tiers.get("unhosted", [])],
    )


async def read(batches: AsyncIterator[Batch], mirror: Mirror, events: KvEvents, most: int | None = None) -> None:
    """Read what there is, or as many batches as `most`."""
    for _ in itertools.count() if most is None else range(most):
        # The first batch is always there: a snapshot.
        if mirror.snapshots and not mirror.more and mirror.sequence == events.log.last:
            return
        mirror.apply(batch_message(await anext(batches), worker_identity()))


def only_batch(events: KvEvents) -> Batch:
    batch = events.log.batch(events.log.last)
    assert batch is not None
    return batch


def test_blocks_of_a_chain_are_one_event_with_their_tokens() -> None:
    events, token_ids = events_of(), list(range(64 * 4))
    events.tokens.submitted(1, TokenRequest("r", token_ids, Sampling(), StopConditions(max_tokens=1)))
    events.observe(1, step([0, 1, 3]))
    first, second = only_batch(events).events
    assert isinstance(first, Stored) and isinstance(second, Stored)
    assert (first.hashes, first.parent, first.medium) == (CHAIN[:2], b"", POOL)
    assert list(memoryview(first.tokens).cast("I")) == token_ids[:128]
    assert (second.hashes, second.parent) == ([CHAIN[3]], CHAIN[2])
    assert list(memoryview(second.tokens).cast("I")) == token_ids[192:]
    assert (only_batch(events).rank, only_batch(events).sequence, only_batch(events).seconds) == (1, 1, 5.0)


def test_tokens_are_not_told_where_they_are_not_to_be() -> None:
    events = events_of(token_ids=False)
    events.tokens.submitted(1, TokenRequest("r", list(range(64)), Sampling(), StopConditions(max_tokens=1)))
    events.observe(0, step([0]))
    (stored,) = only_batch(events).events
    assert isinstance(stored, Stored) and stored.tokens == b"" and len(stored.root) == len(CHAIN[0])


def test_a_block_that_moves_to_host_memory_keeps_its_tokens() -> None:
    events = events_of()
    events.tokens.submitted(1, TokenRequest("r", list(range(64)), Sampling(), StopConditions(max_tokens=1)))
    events.observe(0, step([0]))
    events.observe(0, step(removed=[0], hosted=[0]))
    removed, hosted = only_batch(events).events
    assert isinstance(removed, Removed) and (removed.hashes, removed.medium) == ([CHAIN[0]], POOL)
    assert isinstance(hosted, Stored) and (hosted.hashes, hosted.medium) == ([CHAIN[0]], HOST)
    assert len(hosted.tokens) == 4 * BLOCK_TOKENS


def test_what_a_rank_reports_twice_is_told_once() -> None:
    events = events_of()
    events.observe(0, step([0, 1]))
    events.observe(0, step([0]))
    events.observe(0, step(removed=[5]))
    assert events.log.last == 1
    events.observe(1, step([0]))
    assert events.log.last == 2


def test_a_long_report_is_told_in_several_batches() -> None:
    events, hashes = events_of(), chain_hashes(range(64 * 3000))
    events.observe(0, StepResult(0, [], WorkerLoad(), stored_blocks=hashes, stored_parents=[b"", *hashes[:-1]]))
    told: list[bytes] = []
    for number in range(1, events.log.last + 1):
        batch = events.log.batch(number)
        assert batch is not None and batch.blocks <= kv_events.BATCH_BLOCKS
        for event in batch.events:
            assert isinstance(event, Stored)
            told += event.hashes
    assert told == hashes


indices = st.lists(st.integers(0, len(CHAIN) - 1), unique=True, max_size=4)
reports = st.tuples(st.integers(0, RANKS - 1), indices, indices, indices, indices)


@given(
    steps=st.lists(st.tuples(reports, st.integers(0, 3)), max_size=30),
    kept_blocks=st.integers(1, 12),
    part_blocks=st.integers(1, 4),
)
def test_a_subscriber_knows_every_block_however_slowly_it_reads(
    steps: list[tuple[tuple[int, list[int], list[int], list[int], list[int]], int]], kept_blocks: int, part_blocks: int
) -> None:
    async def follow() -> None:
        events, mirror = events_of(kept_blocks=kept_blocks), Mirror()
        truth: dict[tuple[int, str], set[bytes]] = {}
        batches = events.batches(0)
        for (rank, stored, removed, hosted, unhosted), reads in steps:
            events.observe(rank, step(stored, removed, hosted=hosted, unhosted=unhosted))
            for medium, came, went in ((POOL, stored, removed), (HOST, hosted, unhosted)):
                held = truth.setdefault((rank, medium), set())
                held -= {CHAIN[index] for index in went}
                held |= {CHAIN[index] for index in came}
            kept = sum(batch.blocks for n in range(1, events.log.last + 1) if (batch := events.log.batch(n)))
            assert kept <= kept_blocks or events.log.first == events.log.last
            await read(batches, mirror, events, most=reads)
        await read(batches, mirror, events)
        assert mirror.not_empty() == {place: held for place, held in truth.items() if held}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_events, "PART_BLOCKS", part_blocks)
        asyncio.run(follow())


async def test_a_snapshot_tells_parents_before_their_children() -> None:
    events, seen = events_of(), set[bytes]()
    for index in (2, 1, 0, 3):
        events.observe(0, step([index]))
    batches = events.batches(0)
    parts = [await anext(batches)]
    while parts[-1].more:
        parts.append(await anext(batches))
    assert parts[0].events == [Cleared()] and all(part.sequence == 4 and part.snapshot for part in parts)
    for part in parts:
        for event in part.events:
            if isinstance(event, Stored):
                assert event.parent in seen | {b""}
                seen.update(event.hashes)
    assert seen == set(CHAIN[:4])


async def test_a_kept_number_is_continued_and_any_other_is_not() -> None:
    events = events_of(kept_blocks=3)
    for index in range(5):
        events.observe(0, step([index]))
    assert (events.log.first, events.log.last) == (3, 5)
    for number in (3, 4, 5):
        assert await anext(events.batches(number)) is events.log.batch(number)
    for number in (0, 1, 2, 7, 1 << 63):
        assert (await anext(events.batches(number))).snapshot
    waiting = asyncio.ensure_future(anext(events.batches(6)))
    await asyncio.sleep(0)
    assert not waiting.done()
    events.observe(1, step([6]))
    assert (await waiting).sequence == 6
