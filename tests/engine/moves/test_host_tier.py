"""Engines with a small pool, whose evicted blocks go to host memory: every token depends on the KV that is read."""

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.batch import Batch
from engine.blocks.block_tables import BlockTables
from engine.engine import Engine
from engine.moves import host_slots
from engine.moves.host_slots import PlainSlots
from engine.oracle.backend import OracleBackend
from engine.oracle.tokens import oracle_tokens
from engine.protocol.messages import Cancel
from engine.requests.intake import make_request
from engine.step.shape import StepShape
from mesh.blocks import chain_hashes
from mesh.domain.targets import StoreTarget
from tests.support.disaggregation import moving_engine
from tests.support.engines import (
    VOCABULARY,
    DeferredOracle,
    Transcript,
    assert_at_rest,
    oracle_config,
    oracle_engine,
    prompt_of,
    submit_of,
)
from tests.support.fake_agent import Fabric
from tests.support.later_slots import copy_later
from tests.support.ranks import running_rank, until_an_end


def slow_engine(**settings: Any) -> tuple[Engine, list[Callable[[], None]], list[Callable[[], None]]]:
    """An engine with overlap; its reads from host memory and its writes, which the test carries out."""
    config = oracle_config(**{"total_blocks": 8, "overlap": "on", **settings})
    backend, reads, writes = DeferredOracle(config), list[Callable[[], None]](), list[Callable[[], None]]()
    copy_later(backend, 64, reads.append, writes.append)
    return Engine(config, backend, lambda: 0.0), reads, writes


def finished(engine: Engine, *submits: Any) -> Transcript:
    for submit in submits:
        engine.submit(submit)
    return Transcript().run(engine)


def status(engine: Engine) -> Any:
    found = engine.load().host_tier
    assert found is not None
    return found


def exact(transcript: Transcript, prompts: dict[int, list[int]]) -> None:
    for key, prompt in prompts.items():
        tokens = transcript.token_ids[key]
        assert tokens == oracle_tokens(prompt, len(tokens), VOCABULARY)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_evicted_prefix_comes_back_from_host_memory(ahead: bool) -> None:
    engine = oracle_engine(total_blocks=8, host_blocks=32, ahead=ahead)
    prompt = prompt_of(64 * 5 + 10, seed=1)
    finished(engine, submit_of(1, prompt, 5))
    finished(engine, submit_of(2, prompt_of(64 * 7 + 10, seed=2), 5))
    again = finished(engine, submit_of(3, prompt, 20))
    exact(again, {3: prompt})
    assert again.cached_tokens == {3: 320}
    (first,) = [output for step in again.steps for output in step.outputs if output.cached_tokens is not None]
    assert first.host_cached_tokens == 320 and first.store_cached_tokens == 0
    assert status(engine).read_blocks == 5
    assert status(engine).read_bytes_per_second
    assert_at_rest(engine)


def test_what_the_pool_has_is_not_read_again() -> None:
    engine = oracle_engine(total_blocks=8, host_blocks=32)
    prompt = prompt_of(64 * 5 + 10, seed=1)
    finished(engine, submit_of(1, prompt, 1))
    # This takes the last two of the six blocks.
    finished(engine, submit_of(2, prompt_of(64 * 3 + 10, seed=2), 1))
    found = finished(engine, submit_of(3, prompt, 20))
    exact(found, {3: prompt})
    assert 0 < status(engine).read_blocks < 5
    assert found.cached_tokens == {3: 320}


def test_a_block_is_written_to_host_memory_once() -> None:
    engine = oracle_engine(total_blocks=8, host_blocks=32)
    prompts = {key: prompt_of(64 * 6 + 1, seed=key) for key in (1, 2)}
    for turn in range(6):
        exact(
            finished(engine, submit_of(1 + turn % 2, prompts[1 + turn % 2], 5)), {1 + turn % 2: prompts[1 + turn % 2]}
        )
    assert 0 < status(engine).written_blocks == status(engine).used_blocks <= 12


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preempted_request_reads_what_it_had_computed(ahead: bool) -> None:
    engine = oracle_engine(total_blocks=14, host_blocks=64, max_requests=4, ahead=ahead)
    prompts = {key: prompt_of(120, seed=key) for key in range(4)}
    computed = 0
    for key, prompt in prompts.items():
        engine.submit(submit_of(key, prompt, 400))
    transcript, backend = Transcript(), engine._backend
    launch = backend.launch

    def counting(batch: Batch, shape: StepShape) -> Any:
        nonlocal computed
        computed += sum(len(row.token_ids) for row in batch.rows if not row.decodes)
        return launch(batch, shape)

    backend.launch = counting  # type: ignore[method-assign]
    transcript.run(engine)
    exact(transcript, prompts)
    assert status(engine).read_blocks > 0
    # Each preemption loses less than a block, and no preempted request computes its prompt again.
    assert computed < 2 * sum(map(len, prompts.values()))
    assert_at_rest(engine)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("host_blocks", [3, 40, 4000])
def test_sessions_over_a_small_pool_are_exact(host_blocks: int, drafts: int, ahead: bool) -> None:
    engine = oracle_engine(
        total_blocks=24,
        host_blocks=host_blocks,
        max_requests=4,
        max_step_tokens=128,
        ahead=ahead,
        drafts={"next_n": drafts},
    )
    rng = random.Random(host_blocks + drafts)
    sessions = {key: prompt_of(rng.randrange(1, 300), seed=key) for key in range(12)}
    transcript, key, running = Transcript(), 0, dict[int, tuple[int, list[int]]]()
    for _ in range(5):
        for session, said in rng.sample(sorted(sessions.items()), 8):
            engine.submit(submit_of(key, said, rng.randrange(1, 120)))
            running[key] = session, said
            key += 1
            for _ in range(rng.randrange(6)):
                if engine.has_work():
                    transcript.record(engine.step())
            if rng.random() < 0.15:
                engine.cancel(Cancel(rng.choice(sorted(running))))
        transcript.run(engine)
        for number, (session, said) in running.items():
            exact(transcript, {number: said})
            sessions[session] = (said + transcript.token_ids[number] + prompt_of(20, seed=number))[-900:]
        running.clear()
    assert status(engine).used_blocks <= host_blocks
    if host_blocks > 3:
        assert status(engine).read_blocks > 20
    assert_at_rest(engine)


def test_a_read_holds_its_blocks_after_the_requests_end() -> None:
    engine, reads, _ = slow_engine()
    prompt = prompt_of(64 * 5 + 10, seed=1)
    finished(engine, submit_of(1, prompt, 1), submit_of(2, prompt_of(64 * 7 + 10, seed=2), 1))
    engine.submit(submit_of(3, prompt, 20))
    Transcript().run(engine)
    assert len(reads) == 1 and engine.transfers.open == 1
    engine.cancel(Cancel(3))
    assert Transcript().run(engine).ends[3].finish == "cancelled"
    assert engine.pool.total_blocks - engine.pool.free_blocks == 5
    reads[0]()
    engine.poll_transfers()
    Transcript().run(engine)
    assert_at_rest(engine)


def test_others_go_on_while_a_request_reads() -> None:
    engine, reads, _ = slow_engine(total_blocks=16)
    prompt, other = prompt_of(64 * 9 + 10, seed=1), prompt_of(100, seed=4)
    finished(engine, submit_of(1, prompt, 1), submit_of(2, prompt_of(64 * 15 + 10, seed=2), 1))
    engine.submit(submit_of(3, prompt, 20))
    engine.submit(submit_of(4, other, 20))
    transcript = Transcript().run(engine)
    assert set(transcript.ends) == {4}
    reads[0]()
    engine.poll_transfers()
    exact(transcript.run(engine), {3: prompt, 4: other})
    assert_at_rest(engine)


def test_blocks_are_copied_before_they_are_evicted() -> None:
    engine, _, writes = slow_engine(total_blocks=16)
    prompts = {key: prompt_of(64 * 5 + 10, seed=key) for key in range(4)}
    finished(engine, submit_of(0, prompts[0], 1))
    # Its blocks are copied although nothing has been evicted; until they are, no other block is.
    finished(engine, submit_of(1, prompts[1], 1))
    assert len(writes) == 1 and status(engine).written_blocks == 5
    writes[0]()
    finished(engine, submit_of(2, prompts[2], 1))
    assert len(writes) == 2
    # Nothing waits for a copy that has been carried out, and what is evicted before its own is waited for.
    exact(finished(engine, submit_of(3, prompts[3], 40)), {3: prompts[3]})
    assert_at_rest(engine)


@pytest.mark.parametrize("seed", range(3))
def test_sessions_are_exact_however_late_copies_are(seed: int) -> None:
    engine, reads, writes = slow_engine(total_blocks=24, max_requests=4, max_step_tokens=128)
    rng, transcript = random.Random(seed), Transcript()
    sessions = {key: prompt_of(rng.randrange(100, 300), seed=key) for key in range(10)}
    for turn in range(4):
        for session, said in sessions.items():
            engine.submit(submit_of(100 * turn + session, said, rng.randrange(1, 60)))
        while len(transcript.ends) < len(sessions) * (turn + 1):
            engine.poll_transfers()
            if engine.has_work() and rng.random() < 0.8:
                transcript.record(engine.step())
            elif reads and rng.random() < 0.5:
                reads.pop(rng.randrange(len(reads)))()
            elif writes:
                writes.pop(rng.randrange(len(writes)))()
        for session, said in sessions.items():
            exact(transcript, {100 * turn + session: said})
            sessions[session] = said + transcript.token_ids[100 * turn + session] + prompt_of(9, seed=session)
    assert status(engine).read_blocks > 10
    transcript.run(engine)
    assert_at_rest(engine)


def test_equal_prompts_read_their_prefix_once() -> None:
    engine, reads, _ = slow_engine(total_blocks=16)
    shared = prompt_of(64 * 5, seed=1)
    finished(engine, submit_of(1, [*shared, 1], 1), submit_of(2, prompt_of(64 * 15 + 10, seed=2), 1))
    prompts = {key: [*shared, *prompt_of(20, seed=key)] for key in (3, 4, 5)}
    for key, prompt in prompts.items():
        engine.submit(submit_of(key, prompt, 5))
    transcript = Transcript().run(engine)
    assert len(reads) == 1
    reads[0]()
    engine.poll_transfers()
    exact(transcript.run(engine), prompts)
    assert len(reads) == 1
    assert transcript.cached_tokens == dict.fromkeys(prompts, 320)


def test_a_store_is_asked_for_what_host_memory_lacks() -> None:
    fabric = Fabric(random.Random(0))
    engine = moving_engine(fabric, total_blocks=8, host_blocks=32)
    prompt = prompt_of(64 * 6 + 10, seed=1)

    def run() -> Transcript:
        transcript = Transcript()
        while True:
            transcript.run(engine)
            if not fabric.run_one():
                return transcript
            engine.poll_transfers()

    engine.submit(submit_of(1, prompt[: 64 * 3 + 1], 1))
    run()
    engine.submit(submit_of(2, prompt_of(64 * 7 + 10, seed=2), 1))
    run()
    # What the store has of the chain: computed by another engine.
    other = OracleBackend(oracle_config(total_blocks=8))
    computed = Engine(oracle_config(total_blocks=8), other, lambda: 0.0)
    computed.submit(submit_of(1, prompt, 1))
    Transcript().run(computed)
    hashes = chain_hashes(prompt)
    blocks = computed.pool.match_prefix(hashes)
    pool = other.pool
    fabric.stored = {content: pool[:, block].tobytes() for content, block in zip(hashes, blocks, strict=True)}
    engine.submit(submit_of(3, prompt, 20, fetch=StoreTarget("store", 6)))
    found = run()
    exact(found, {3: prompt})
    (first,) = [output for step in found.steps for output in step.outputs if output.cached_tokens is not None]
    assert (first.cached_tokens, first.host_cached_tokens, first.store_cached_tokens) == (384, 192, 192)
    assert_at_rest(engine)


def test_memory_that_is_not_granted_leaves_the_engine_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(self: PlainSlots, pool: object, count: int) -> None:
        raise MemoryError

    monkeypatch.setattr(host_slots.PlainSlots, "__init__", none)
    with caplog.at_level(logging.WARNING, "deepmesh.engine"):
        engine = oracle_engine(total_blocks=8, host_blocks=32)
    assert "engine.host_blocks" in caplog.text
    prompt = prompt_of(64 * 5 + 10, seed=1)
    exact(finished(engine, submit_of(1, prompt, 5)), {1: prompt})
    assert engine.load().host_tier is None


async def test_a_rank_without_the_host_memory_it_asked_for_serves() -> None:
    prompt = prompt_of(64 * 5 + 10, seed=1)
    # More bytes than any machine has.
    async with running_rank(oracle_config(total_blocks=8, host_blocks=1 << 50)) as rank:
        rank.submit(submit_of(1, prompt, 5))
        found = await until_an_end(rank)
    exact(found, {1: prompt})
    assert found.steps[-1].load.host_tier is None


def test_slots_that_come_later_are_used() -> None:
    """As on a GPU, whose worker page-locks host memory while it serves."""
    config = oracle_config(total_blocks=8)
    backend = OracleBackend(config)
    slots = PlainSlots([backend.pool], 32)
    slots.count = 0
    backend.host_slots = lambda: slots  # type: ignore[method-assign]
    engine = Engine(config, backend, lambda: 0.0)
    prompts = {key: prompt_of(64 * 7 + 10, seed=key) for key in range(3)}
    finished(engine, submit_of(0, prompts[0], 1))
    finished(engine, submit_of(1, prompts[1], 1))
    assert (status(engine).total_blocks, status(engine).written_blocks) == (0, 0)
    slots.count = 5
    exact(finished(engine, submit_of(2, prompts[2], 1)), {2: prompts[2]})
    assert (status(engine).total_blocks, status(engine).used_blocks) == (5, 5)
    assert finished(engine, submit_of(3, prompts[1], 1)).cached_tokens[3] > 0


def test_what_comes_and_goes_in_host_memory_is_reported() -> None:
    engine = oracle_engine(total_blocks=8, host_blocks=7)
    hashes = []
    hosted: set[bytes] = set()
    for key in range(4):
        prompt = prompt_of(64 * 5 + 10, seed=key)
        hashes += chain_hashes(prompt)
        for step in finished(engine, submit_of(key, prompt, 1)).steps:
            assert not hosted & set(step.hosted_blocks) and hosted >= set(step.unhosted_blocks)
            hosted = (hosted | set(step.hosted_blocks)) - set(step.unhosted_blocks)
    assert len(hosted) == status(engine).used_blocks == 7
    assert hosted < set(hashes)


def test_prefixes_of_tenants_with_other_salts_stay_apart() -> None:
    engine = oracle_engine(total_blocks=8, host_blocks=32)
    prompt = prompt_of(64 * 5 + 10, seed=1)
    finished(engine, submit_of(1, prompt, 1, cache_salt=b"a"))
    finished(engine, submit_of(2, prompt_of(64 * 7 + 10, seed=2), 1))
    assert finished(engine, submit_of(3, prompt, 1, cache_salt=b"b")).cached_tokens == {3: 0}
    assert finished(engine, submit_of(4, prompt, 1, cache_salt=b"a")).cached_tokens == {4: 320}


def test_blocks_with_incomplete_draft_layers_come_back_as_such() -> None:
    engine = oracle_engine(total_blocks=8, host_blocks=32)
    prompt = prompt_of(64 * 5 + 10, seed=1)
    tables = BlockTables(engine.pool, prefix_cache=True)
    request = make_request(submit_of(9, prompt, 5), frozenset(), (0, 0))
    tables.fill(request, ())
    request.progress.lack_drafts(3)
    request.progress.landed(64 * 5)
    tables.register(request)
    tables.release(request)
    finished(engine, submit_of(2, prompt_of(64 * 7 + 10, seed=2), 5))
    engine.submit(submit_of(3, prompt, 5))
    transcript = Transcript()
    transcript.record(engine.step())
    assert status(engine).read_blocks == 5
    (first,) = [output for step in transcript.run(engine).steps for output in step.outputs if output.cached_tokens]
    assert (first.cached_tokens, first.drafts_end) == (320, 3)
    # What it adds to the chain is reported as incomplete too.
    draftless = {block for step in transcript.steps for block in step.draftless_blocks}
    assert draftless == set(chain_hashes(prompt)[3:])
