"""A prompt computed by one engine, decoded by another: the oracle's tokens prove that the KV is right."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.oracle.backend import OracleBackend
from engine.oracle.tokens import oracle_tokens
from mesh.blocks import chain_hashes
from mesh.domain.sampling import Sampling
from mesh.domain.targets import StoreTarget
from tests.support.disaggregation import LayerReportingOracle, Pair, assert_nothing_moves, make_pair
from tests.support.engines import VOCABULARY, DeferredOracle, prompt_of, submit_of

# The first computes at launch, the second also reports its layers then, the third computes when a step is collected.
BACKENDS = [OracleBackend, LayerReportingOracle, DeferredOracle]


def rng_of(seed: int = 0) -> random.Random:
    return random.Random(seed)


def served(pair: Pair, prompt: list[int], max_tokens: int = 20, key: int = 1, **options: Any) -> list[int]:
    pair.submit(submit_of(key, prompt, max_tokens, remote_prefill=True, **options))
    return pair.run(rng_of()).transcript.token_ids[key]


@pytest.mark.parametrize("backend_type", BACKENDS)
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 200, 511, 512, 513])
def test_a_disaggregated_request_gets_the_monolithic_tokens(length: int, backend_type: type[OracleBackend]) -> None:
    pair = make_pair(rng_of(length), backend_type, max_step_tokens=128)
    prompt = prompt_of(length)
    assert served(pair, prompt, 70) == oracle_tokens(prompt, 70, VOCABULARY)
    assert pair.transcript.ends[1].finish == "length"
    assert list(pair.landings.values()) == [1]
    assert_nothing_moves(pair)


def test_a_landing_begins_after_the_blocks_that_decode_holds() -> None:
    pair = make_pair(rng_of())
    prompt = prompt_of(300)
    served(pair, prompt[:129])
    before = sum(end.size_bytes for end in pair.push_ends)
    assert served(pair, prompt, key=2) == oracle_tokens(prompt, 20, VOCABULARY)
    assert sum(end.size_bytes for end in pair.push_ends) - before == 3 * 512
    assert_nothing_moves(pair)


def test_what_prefill_found_in_its_pool_is_reported_and_pushed() -> None:
    pair = make_pair(rng_of(), decode={"prefix_cache": False})
    prompt = prompt_of(300)
    served(pair, prompt[:200])
    assert served(pair, prompt, key=2) == oracle_tokens(prompt, 20, VOCABULARY)
    assert pair.transcript.cached_tokens == {1: 0, 2: 192}


def test_decode_computes_a_prompt_that_lacks_only_its_last_block() -> None:
    pair = make_pair(rng_of())
    prompt = prompt_of(300)
    served(pair, prompt[:257])
    assert served(pair, prompt, key=2) == oracle_tokens(prompt, 20, VOCABULARY)
    assert list(pair.landings.values()) == [1]
    assert pair.transcript.cached_tokens[2] == 256


def test_landed_blocks_are_found_by_the_next_request() -> None:
    pair = make_pair(rng_of())
    prompt = prompt_of(300)
    first = served(pair, prompt, 30)
    stored = [block for step in pair.transcript.steps for block in step.stored_blocks]
    assert stored == chain_hashes(prompt + first)


def test_log_probabilities_of_the_first_token_come_from_prefill() -> None:
    pair = make_pair(rng_of())
    served(pair, prompt_of(100), 3, sampling=Sampling(top_logprobs=2))
    assert [len(position.top_token_ids) for position in pair.transcript.logprobs[1]] == [2, 2, 2]


def test_sampled_tokens_are_equal_wherever_the_prompt_was_computed() -> None:
    pair, sampling = make_pair(rng_of()), Sampling(temperature=0.8, seed=5)
    prompt = prompt_of(100)
    assert served(pair, prompt, sampling=sampling) == oracle_tokens(prompt, 20, VOCABULARY, sampling)


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128])
@pytest.mark.parametrize("next_n", [1, 5])
def test_drafts_change_no_token_wherever_the_prompt_was_computed(length: int, next_n: int) -> None:
    pair = make_pair(rng_of(length), decode={"drafts": {"next_n": next_n}})
    prompt = prompt_of(length)
    assert served(pair, prompt, 70) == oracle_tokens(prompt, 70, VOCABULARY)
    assert list(pair.landings.values()) == [1]
    assert_nothing_moves(pair)


@pytest.mark.parametrize("stops", [True, False])
def test_a_request_of_one_token_gives_up_its_landing(stops: bool) -> None:
    pair = make_pair(rng_of())
    prompt = prompt_of(300)
    first = oracle_tokens(prompt, 1, VOCABULARY)
    options: dict[str, Any] = {"stop_token_ids": first} if stops else {}
    assert served(pair, prompt, 10 if stops else 1, **options) == first
    assert pair.transcript.ends[1].finish == ("stop" if stops else "length")
    assert_nothing_moves(pair)


def test_a_preempted_landed_request_computes_again_what_it_lost() -> None:
    pair = make_pair(rng_of(), decode={"total_blocks": 9})
    prompts = [prompt_of(100, seed) for seed in range(3)]
    for key, prompt in enumerate(prompts):
        pair.submit(submit_of(key, prompt, 150, remote_prefill=True))
    pair.run(rng_of())
    for key, prompt in enumerate(prompts):
        assert pair.transcript.token_ids[key] == oracle_tokens(prompt, 150, VOCABULARY)
    assert_nothing_moves(pair)


def test_an_engine_that_only_waits_for_kv_has_no_work() -> None:
    pair = make_pair(rng_of())
    pair.submit(submit_of(1, prompt_of(100), 5, remote_prefill=True))
    for _ in range(3):
        pair.step(pair.decode)
    assert not pair.decode.has_work()
    assert pair.decode.load().running_requests == 1


def test_a_prefix_from_the_store_is_not_computed() -> None:
    pair = make_pair(rng_of())
    prompt = prompt_of(400)
    fill_store(pair, prompt)
    pair.submit(submit_of(1, prompt, 20, fetch=StoreTarget("store", 5)))
    pair.run(rng_of())
    assert pair.transcript.token_ids[1] == oracle_tokens(prompt, 20, VOCABULARY)
    first = next(output for step in pair.transcript.steps for output in step.outputs)
    assert (first.cached_tokens, first.store_cached_tokens) == (320, 320)
    assert_nothing_moves(pair)


def test_prefill_fetches_what_its_own_pool_lacks() -> None:
    pair = make_pair(rng_of(), decode={"prefix_cache": False})
    prompt = prompt_of(400)
    fill_store(pair, prompt)
    served(pair, prompt[:140])
    pair.fetches[2] = StoreTarget("store", 6)
    assert served(pair, prompt, key=2) == oracle_tokens(prompt, 20, VOCABULARY)
    assert pair.transcript.cached_tokens[2] == 384
    (first,) = [output for step in pair.prefilled.steps for output in step.outputs if output.key == 2]
    assert first.store_cached_tokens == 256
    assert_nothing_moves(pair)


def test_a_store_that_has_less_than_thought_costs_only_time() -> None:
    pair = make_pair(rng_of())
    prompt = prompt_of(400)
    fill_store(pair, prompt[:130])
    for key, fetch in enumerate((StoreTarget("store", 6), StoreTarget("store", 100), StoreTarget("store", 1))):
        pair.submit(submit_of(key, prompt, 20, fetch=fetch, cache_salt=b"" if key == 0 else b"other"))
        pair.run(rng_of())
        assert pair.transcript.token_ids[key] == oracle_tokens(prompt, 20, VOCABULARY)
    assert pair.transcript.cached_tokens == {0: 128, 1: 0, 2: 384}
    assert_nothing_moves(pair)


def fill_store(pair: Pair, prompt: list[int]) -> None:
    """Put the prompt's full blocks into the store, as if they had been offered."""
    other = make_pair(rng_of())
    other.submit(submit_of(0, prompt, 1))
    other.run(rng_of())
    hashes = chain_hashes(prompt)
    memory = other.fabric.agents[0].memory
    for content, block in zip(hashes, other.decode.pool.match_prefix(hashes), strict=True):
        staging = memory.allocate_staging(memory.piece_bytes)
        memory.gather(0, 1, [block], staging, b"")
        pair.fabric.stored[content] = staging.tobytes()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    backend_type=st.sampled_from(BACKENDS),
    total_blocks=st.integers(5, 24),
    max_requests=st.integers(1, 12),
    layerwise_tokens=st.sampled_from([64, 128, 1 << 30]),
    failure_probability=st.sampled_from([0.0, 0.0, 0.1]),
    cancel_probability=st.sampled_from([0.0, 0.1]),
    next_n=st.sampled_from([0, 0, 2, 5]),
    host_blocks=st.sampled_from([0, 2, 100]),
)
def test_any_order_of_events_gives_right_tokens_and_frees_everything(
    seed: int,
    backend_type: type[OracleBackend],
    total_blocks: int,
    max_requests: int,
    layerwise_tokens: int,
    failure_probability: float,
    cancel_probability: float,
    next_n: int,
    host_blocks: int,
) -> None:
    rng = rng_of(seed)
    pair = make_pair(
        rng,
        backend_type,
        max_requests=max_requests,
        max_step_tokens=max(rng.choice([64, 200]), max_requests * (1 + next_n)),
        layerwise_tokens=layerwise_tokens,
        host_blocks=host_blocks,
        decode={"total_blocks": total_blocks, "drafts": {"next_n": next_n}},
        prefill={"total_blocks": rng.randint(5, 24)},
    )
    pair.fabric.failure_probability = failure_probability
    documents = [prompt_of(250, seed) for seed in range(2)]
    fill_store(pair, documents[0][: rng.randrange(64, 250)])
    cancelled = set()
    for key in range(12):
        prompt = rng.choice(documents)[: rng.randint(1, 250)] + prompt_of(rng.randint(1, 40), seed + key)
        fetch = rng.choice([None, StoreTarget("store", rng.randint(1, 5))])
        remote = rng.random() < 0.7
        if remote and fetch is not None:
            pair.fetches[key] = fetch
        pair.submit(submit_of(key, prompt, rng.randint(1, 30), remote_prefill=remote, fetch=None if remote else fetch))
        for _ in range(rng.randint(0, 10)):
            choices: list[Callable[[], object]] = [
                pair.relay_one,
                pair.fabric.run_one,
                lambda: pair.step(pair.decode),
                lambda: pair.step(pair.prefill),
            ]
            rng.choice(choices)()
        if rng.random() < cancel_probability * 3:
            victim = rng.randrange(key + 1)
            cancelled.add(victim)
            pair.cancel(victim)
    pair.run(rng)
    check_ends(pair, cancelled)
    assert_nothing_moves(pair)


def check_ends(pair: Pair, cancelled: set[int]) -> None:
    for key, submit in pair.submits.items():
        end, tokens = pair.transcript.ends[key], pair.transcript.token_ids[key]
        assert tokens == oracle_tokens(submit.request.token_ids, len(tokens), VOCABULARY)
        if end.finish == "length":
            assert len(tokens) == submit.request.stop.max_tokens
        elif end.refusal is not None:
            assert end.refusal.reason in ("PREFILL_LOST", "CONTEXT_EXCEEDED")
        else:
            assert end.finish == "cancelled"
            assert key in cancelled | pair.lost_keys
