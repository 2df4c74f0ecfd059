from typing import Any

import pytest

from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.oracle.tokens import oracle_tokens
from engine.protocol.messages import Cancel
from mesh.domain.sampling import Sampling
from tests.support.engines import (
    VOCABULARY,
    Transcript,
    assert_at_rest,
    oracle_config,
    oracle_engine,
    prompt_of,
    submit_of,
)


class EndingBackend(OracleBackend):
    """The oracle with end-of-sequence ids."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        super().__init__(oracle_config(total_blocks=16))
        self.eos_token_ids = eos_token_ids


def engine_that_ends_with(token_id: int) -> Engine:
    return Engine(oracle_config(total_blocks=16), EndingBackend(frozenset([token_id])), lambda: 0.0)


def test_an_engine_without_requests_has_nothing_to_do() -> None:
    engine = oracle_engine(total_blocks=8)
    assert not engine.has_work()
    assert engine.step() is None


def test_generation_ends_after_max_tokens() -> None:
    engine = oracle_engine(total_blocks=8)
    prompt = prompt_of(70)
    engine.submit(submit_of(1, prompt, 20))
    transcript = Transcript().run(engine)
    assert transcript.token_ids[1] == oracle_tokens(prompt, 20, VOCABULARY)
    assert transcript.ends[1].finish == "length"
    assert_at_rest(engine)


def test_a_stop_token_ends_generation_and_is_reported() -> None:
    engine = oracle_engine(total_blocks=8)
    prompt = prompt_of(70)
    expected = oracle_tokens(prompt, 20, VOCABULARY)
    engine.submit(submit_of(1, prompt, 20, stop_token_ids=[expected[7]]))
    transcript = Transcript().run(engine)
    assert transcript.token_ids[1] == expected[: expected.index(expected[7]) + 1]
    assert transcript.ends[1].finish == "stop"
    assert_at_rest(engine)


def test_the_models_own_end_ends_generation_unless_ignored() -> None:
    prompt = prompt_of(10)
    expected = oracle_tokens(prompt, 20, VOCABULARY)
    engine = engine_that_ends_with(expected[4])
    engine.submit(submit_of(1, prompt, 20))
    engine.submit(submit_of(2, prompt, 20, ignore_eos=True))
    transcript = Transcript().run(engine)
    assert transcript.ends[1].finish == "stop"
    assert transcript.token_ids[1] == expected[: expected.index(expected[4]) + 1]
    assert transcript.token_ids[2] == expected


def test_positions_go_on_from_the_prompt() -> None:
    engine = oracle_engine(total_blocks=8)
    engine.submit(submit_of(1, prompt_of(70), 3))
    steps = Transcript().run(engine).steps
    assert [output.first_position for step in steps for output in step.outputs] == [70, 71, 72]


def test_logprobs_come_with_every_token_where_asked_for() -> None:
    engine = oracle_engine(total_blocks=8)
    engine.submit(submit_of(1, prompt_of(5), 4, sampling=Sampling(top_logprobs=2)))
    engine.submit(submit_of(2, prompt_of(5), 4))
    transcript = Transcript().run(engine)
    assert [len(logprobs.top_token_ids) for logprobs in transcript.logprobs[1]] == [2, 2, 2, 2]
    assert transcript.logprobs[2] == []


def test_a_long_prompt_is_computed_over_several_steps() -> None:
    engine = oracle_engine(total_blocks=16, max_step_tokens=100, max_requests=4)
    prompt = prompt_of(450)
    engine.submit(submit_of(1, prompt, 2))
    transcript = Transcript().run(engine)
    assert [step.step for step in transcript.steps if step.outputs] == [5, 6]
    assert transcript.token_ids[1] == oracle_tokens(prompt, 2, VOCABULARY)


def test_requests_submitted_together_start_with_the_shortest() -> None:
    engine = oracle_engine(total_blocks=32, max_step_tokens=64, max_requests=4)
    for key, length in enumerate((400, 200, 64)):
        engine.submit(submit_of(key, prompt_of(length, seed=key), 1))
    engine.step()
    engine.submit(submit_of(3, prompt_of(10), 1))
    transcript = Transcript().run(engine)
    assert [key for key in transcript.ends if key != 2] == [1, 0, 3]


def test_the_mean_length_of_finished_answers_is_reported() -> None:
    engine = oracle_engine(total_blocks=16)
    assert engine.load().mean_output_tokens is None
    for key in range(3):
        engine.submit(submit_of(key, prompt_of(20, seed=key), 7))
        Transcript().run(engine)
    assert engine.load().mean_output_tokens == pytest.approx(7)


def preempted_run(**settings: Any) -> tuple[Transcript, list[list[int]]]:
    """Three requests in a pool that holds two of them when they have grown."""
    engine = oracle_engine(total_blocks=9, **settings)
    prompts = [prompt_of(100, seed=seed) for seed in range(3)]
    for key, prompt in enumerate(prompts):
        engine.submit(submit_of(key, prompt, 150))
    transcript = Transcript()
    preempted = False
    while engine.has_work():
        transcript.record(engine.step())
        load = engine.load()
        preempted = preempted or (0 in transcript.token_ids and load.waiting_requests > 0)
    assert preempted
    assert_at_rest(engine)
    return transcript, prompts


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_goes_on_where_it_was(prefix_cache: bool) -> None:
    transcript, prompts = preempted_run(prefix_cache=prefix_cache)
    for key, prompt in enumerate(prompts):
        assert transcript.token_ids[key] == oracle_tokens(prompt, 150, VOCABULARY)
        assert transcript.cached_tokens[key] == 0


def test_cancelling_a_waiting_request_ends_it() -> None:
    engine = oracle_engine(total_blocks=8, max_requests=1)
    engine.submit(submit_of(1, prompt_of(10), 50))
    engine.step()
    engine.submit(submit_of(2, prompt_of(10), 50))
    engine.cancel(Cancel(2))
    transcript = Transcript().run(engine)
    assert transcript.ends[2].finish == "cancelled"
    assert transcript.token_ids[2] == []
    assert len(transcript.token_ids[1]) == 49


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_cancelling_a_running_request_ends_it_and_frees_its_blocks(steps: int) -> None:
    engine = oracle_engine(total_blocks=16, max_step_tokens=64, max_requests=4)
    engine.submit(submit_of(1, prompt_of(200), 500))
    transcript = Transcript()
    for _ in range(steps):
        transcript.record(engine.step())
    engine.cancel(Cancel(1))
    transcript.run(engine)
    assert transcript.ends[1].finish == "cancelled"
    assert transcript.ends[1].first_position == 200 + len(transcript.token_ids[1])
    assert_at_rest(engine)


def test_a_cancelled_request_ends_once_however_often_it_is_cancelled() -> None:
    engine = oracle_engine(total_blocks=8)
    engine.submit(submit_of(1, prompt_of(10), 50))
    engine.cancel(Cancel(1))
    engine.cancel(Cancel(1))
    transcript = Transcript().run(engine)
    engine.cancel(Cancel(1))
    assert not engine.has_work()
    assert list(transcript.ends) == [1]


def test_a_finished_key_may_be_used_again() -> None:
    engine = oracle_engine(total_blocks=8)
    for _ in range(2):
        engine.submit(submit_of(1, prompt_of(10), 5))
        assert Transcript().run(engine).ends[1].finish == "length"


def test_two_live_requests_with_one_key_are_a_bug() -> None:
    engine = oracle_engine(total_blocks=8)
    engine.submit(submit_of(1, prompt_of(10), 5))
    with pytest.raises(AssertionError):
        engine.submit(submit_of(1, prompt_of(10), 5))


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [
        ([], 5, "INVALID_REQUEST"),
        ([1], 0, "INVALID_REQUEST"),
        ([1, VOCABULARY], 5, "INVALID_REQUEST"),
        ([1, -1], 5, "INVALID_REQUEST"),
        (prompt_of(90), 11, "CONTEXT_EXCEEDED"),
    ],
)
def test_a_request_that_can_never_run_is_refused(prompt: list[int], max_tokens: int, reason: str) -> None:
    engine = oracle_engine(total_blocks=8, context_tokens=100)
    engine.submit(submit_of(1, prompt, max_tokens))
    end = Transcript().run(engine).ends[1]
    assert end.refusal is not None
    assert end.refusal.reason == reason
    assert_at_rest(engine)


def test_only_a_request_longer_than_the_pool_is_refused() -> None:
    engine = oracle_engine(total_blocks=3)
    prompt = prompt_of(100)
    engine.submit(submit_of(1, prompt, 93))
    engine.submit(submit_of(2, prompt, 92))
    transcript = Transcript().run(engine)
    refusal = transcript.ends[1].refusal
    assert refusal is not None
    assert refusal.reason == "CONTEXT_EXCEEDED"
    assert transcript.token_ids[2] == oracle_tokens(prompt, 92, VOCABULARY)


def test_the_load_counts_what_runs_and_what_waits() -> None:
    engine = oracle_engine(total_blocks=16, max_requests=2, max_step_tokens=64)
    for key, length in enumerate((30, 100, 50)):
        engine.submit(submit_of(key, prompt_of(length, seed=key), 10))
    load = engine.load()
    assert (load.queued_prefill_tokens, load.waiting_blocks) == (180, 1 + 2 + 1)
    engine.step()
    load = engine.load()
    assert (load.running_requests, load.waiting_requests) == (2, 1)
    # The shortest go first: the one of two blocks waits.
    assert load.waiting_blocks == 2
    assert load.queued_prefill_tokens == 180 - 64
    assert load.free_blocks == 14
