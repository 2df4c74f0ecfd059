"""The prefixes that an engine finds in its own pool, and what it reports about them."""

import pytest

from engine.oracle.tokens import oracle_tokens
from engine.protocol.messages import Cancel
from mesh.blocks import chain_hashes
from mesh.domain.shares import Share
from tests.support.engines import VOCABULARY, Transcript, assert_at_rest, oracle_engine, prompt_of, submit_of


def test_a_repeated_prompt_computes_only_its_last_token() -> None:
    engine = oracle_engine(total_blocks=16)
    for length, cached in ((128, 64), (129, 128), (191, 128)):
        prompt = prompt_of(length, seed=length)
        engine.submit(submit_of(1, prompt, 1))
        assert Transcript().run(engine).cached_tokens == {1: 0}
        engine.submit(submit_of(2, prompt, 5))
        again = Transcript().run(engine)
        assert again.cached_tokens == {2: cached}
        assert again.token_ids[2] == oracle_tokens(prompt, 5, VOCABULARY)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("step_tokens", [96, 160, 4096])
def test_equal_prompts_that_arrive_together_are_computed_once(step_tokens: int, ahead: bool) -> None:
    engine = oracle_engine(total_blocks=64, max_step_tokens=step_tokens, ahead=ahead)
    shared = prompt_of(320)
    prompts = {key: [*shared, *prompt_of(20, seed=key)] for key in range(4)}
    for key, prompt in prompts.items():
        engine.submit(submit_of(key, prompt, 5))
    transcript = Transcript().run(engine)
    assert sorted(transcript.cached_tokens.values()) == [0, 320, 320, 320]
    assert transcript.token_ids == {key: oracle_tokens(prompt, 5, VOCABULARY) for key, prompt in prompts.items()}
    assert_at_rest(engine)


def test_a_prompt_outlives_the_one_that_computes_its_blocks() -> None:
    engine = oracle_engine(total_blocks=64, max_step_tokens=100)
    prompt = prompt_of(320)
    for key in (1, 2):
        engine.submit(submit_of(key, prompt, 5))
    transcript = Transcript()
    transcript.record(engine.step())
    engine.cancel(Cancel(1))
    transcript.run(engine)
    assert transcript.token_ids[2] == oracle_tokens(prompt, 5, VOCABULARY)
    assert transcript.cached_tokens[2] == 64
    assert_at_rest(engine)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    engine = oracle_engine(total_blocks=16)
    prompt = prompt_of(40)
    engine.submit(submit_of(1, prompt, 100))
    first = Transcript().run(engine)
    engine.submit(submit_of(2, prompt + first.token_ids[1] + prompt_of(9), 5))
    # The last token generated was never computed: 139 tokens are two full blocks.
    assert Transcript().run(engine).cached_tokens == {2: 128}


def test_tenants_with_different_salts_share_nothing() -> None:
    engine = oracle_engine(total_blocks=16)
    for key, salt in enumerate((b"a", b"b", b"a")):
        engine.submit(submit_of(key, prompt_of(130), 1, cache_salt=salt))
        assert Transcript().run(engine).cached_tokens[key] == (128 if key == 2 else 0)


def test_without_a_prefix_cache_everything_is_computed_again() -> None:
    engine = oracle_engine(total_blocks=16, prefix_cache=False)
    for key in range(2):
        engine.submit(submit_of(key, prompt_of(130), 1))
        transcript = Transcript().run(engine)
        assert transcript.cached_tokens[key] == 0
        assert all(step.stored_blocks == [] for step in transcript.steps)


def test_stored_blocks_are_the_chain_of_prompt_and_answer() -> None:
    engine = oracle_engine(total_blocks=16)
    prompt = prompt_of(100)
    engine.submit(submit_of(1, prompt, 60, cache_salt=b"tenant", share=Share("acme")))
    transcript = Transcript().run(engine)
    stored = [block for step in transcript.steps for block in step.stored_blocks]
    assert stored == chain_hashes(prompt + transcript.token_ids[1], b"tenant")
    assert [step.stored_tenants for step in transcript.steps if step.stored_tenants] == [{stored[0]: "acme"}]


def test_evicted_blocks_are_reported_removed() -> None:
    engine = oracle_engine(total_blocks=4)
    engine.submit(submit_of(1, prompt_of(129, seed=1), 1))
    first = Transcript().run(engine)
    engine.submit(submit_of(2, prompt_of(250, seed=2), 1))
    second = Transcript().run(engine)
    removed = [block for step in second.steps for block in step.removed_blocks]
    assert sorted(removed) == sorted(block for step in first.steps for block in step.stored_blocks)


def test_a_preempted_prompts_own_tokens_do_not_count_as_cached() -> None:
    engine = oracle_engine(total_blocks=16, max_step_tokens=64, max_requests=2)
    engine.submit(submit_of(1, prompt_of(62, seed=1), 50))
    transcript = Transcript()
    transcript.record(engine.step())
    prompt = prompt_of(300, seed=2)
    engine.submit(submit_of(2, prompt, 5))
    for _ in range(2):
        transcript.record(engine.step())
    scarce = engine.pool.allocate(engine.pool.free_blocks)
    transcript.record(engine.step())
    assert engine.load().waiting_requests == 1
    engine.pool.release(scarce)
    transcript.run(engine)
    assert transcript.cached_tokens[2] == 0
    assert transcript.token_ids[2] == oracle_tokens(prompt, 5, VOCABULARY)
