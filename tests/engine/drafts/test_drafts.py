"""Requests whose rows yield several tokens, on the oracle backend: the same tokens in fewer steps."""

from typing import Any

import pytest

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.oracle.config import OracleConfig
from engine.oracle.tokens import oracle_tokens
from engine.pace.step_times import StepTimes
from mesh.domain.sampling import Sampling
from tests.support.engines import (
    VOCABULARY,
    Others,
    Transcript,
    assert_at_rest,
    oracle_config,
    oracle_engine,
    prompt_of,
    submit_of,
)
from tests.support.scheduling import ManualClock

PROMPT = prompt_of(100)


def drafting_engine(next_n: int, accuracy: float = 1.0, **settings: Any) -> Engine:
    return oracle_engine(drafts={"next_n": next_n}, oracle={"draft_accuracy": accuracy}, total_blocks=32, **settings)


def run(engine: Engine, max_tokens: int, **settings: Any) -> Transcript:
    engine.submit(submit_of(1, PROMPT, max_tokens, **settings))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    return transcript


def yields(transcript: Transcript) -> list[int]:
    return [len(output.token_ids) for step in transcript.steps for output in step.outputs]


@pytest.mark.parametrize("next_n", [1, 3, 5])
def test_right_drafts_make_each_step_yield_all_of_them(next_n: int) -> None:
    transcript = run(drafting_engine(next_n), 2 + 6 * (1 + next_n))
    assert yields(transcript) == [1, *[1 + next_n] * 6, 1]


def test_wrong_drafts_bring_one_token_a_step() -> None:
    assert yields(run(drafting_engine(3, accuracy=0.0), 20)) == [1] * 20


def test_tokens_after_a_wrong_draft_are_not_taken() -> None:
    transcript = run(drafting_engine(4, accuracy=0.6), 200)
    assert set(yields(transcript)) == {1, 2, 3, 4, 5}
    assert transcript.token_ids[1] == oracle_tokens(PROMPT, 200, VOCABULARY)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_no_token_follows_the_last_one_wanted(max_tokens: int, ahead: bool) -> None:
    transcript = run(drafting_engine(4, ahead=ahead), max_tokens)
    assert transcript.token_ids[1] == oracle_tokens(PROMPT, max_tokens, VOCABULARY)
    assert transcript.ends[1].finish == "length"


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("last", range(12))
def test_a_stop_token_among_accepted_drafts_ends_the_request(last: int, ahead: bool) -> None:
    expected = oracle_tokens(PROMPT, 12, VOCABULARY)[: last + 1]
    transcript = run(drafting_engine(4, ahead=ahead), 100, stop_token_ids=expected[-1:])
    assert transcript.token_ids[1] == expected
    assert transcript.ends[1].finish == "stop"


def test_each_accepted_token_has_its_log_probabilities() -> None:
    transcript = run(drafting_engine(3), 21, sampling=Sampling(temperature=1.0, seed=4, top_logprobs=2))
    tokens = transcript.token_ids[1]
    assert [position.top_token_ids[0] for position in transcript.logprobs[1]] == tokens
    assert tokens == oracle_tokens(PROMPT, 21, VOCABULARY, Sampling(temperature=1.0, seed=4))


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("next_n", [1, 5])
def test_a_request_as_long_as_the_pool_completes(next_n: int, ahead: bool) -> None:
    engine = oracle_engine(drafts={"next_n": next_n}, total_blocks=3, ahead=ahead)
    engine.submit(submit_of(1, PROMPT, 92))
    assert Transcript().run(engine).token_ids[1] == oracle_tokens(PROMPT, 92, VOCABULARY)
    assert_at_rest(engine)


def test_a_step_keeps_within_its_tokens() -> None:
    engine = oracle_engine(
        drafts={"next_n": 3}, oracle={"draft_accuracy": 1.0}, max_requests=16, max_step_tokens=64, total_blocks=99
    )
    for key in range(16):
        engine.submit(submit_of(key, prompt_of(20, key), 50))
    transcript = Transcript().run(engine)
    assert max(sum(len(output.token_ids) for output in step.outputs) for step in transcript.steps) <= 64
    assert all(transcript.token_ids[key] == oracle_tokens(prompt_of(20, key), 50, VOCABULARY) for key in range(16))


def test_verified_and_accepted_drafts_are_reported_by_place() -> None:
    results = run(drafting_engine(2), 2 + 5 * 3).steps
    counts = [result.drafts for result in results if result.drafts is not None]
    assert [sum(column) for column in zip(*(each.verified for each in counts), strict=True)] == [5, 5, 0, 0, 0]
    assert [sum(column) for column in zip(*(each.accepted for each in counts), strict=True)] == [5, 5, 0, 0, 0]
    wrong = run(drafting_engine(2, accuracy=0.0), 10).steps
    assert all(not any(result.drafts.accepted) for result in wrong if result.drafts is not None)


def test_a_token_takes_its_share_of_a_step() -> None:
    clock = ManualClock()
    config = oracle_config(drafts={"next_n": 3}, oracle={"draft_accuracy": 1.0, "step_ms": 40.0}, total_blocks=32)
    backend = OracleBackend(config, clock, lambda seconds: setattr(clock, "now", clock.now + seconds))
    engine = Engine(config, backend, clock)
    transcript = run(engine, 1 + 4 * 20)
    assert transcript.steps[-1].load.decode_step_ms == pytest.approx(10.0)


def test_generated_blocks_are_the_chain_of_the_tokens() -> None:
    plain, drafting = (run(oracle_engine(drafts={"next_n": next_n}), 150) for next_n in (0, 4))
    stored = [[block for step in transcript.steps for block in step.stored_blocks] for transcript in (plain, drafting)]
    assert stored[0] == stored[1]


def test_steps_with_drafts_are_launched_ahead_as_others_are() -> None:
    drafting = EngineConfig(backend="oracle", oracle=OracleConfig(), drafts=DraftsConfig(next_n=1), max_step_tokens=128)
    assert drafting.launches_ahead(asynchronous=True) and not drafting.launches_ahead(asynchronous=False)
    assert drafting.model_copy(update={"overlap": "on"}).launches_ahead(asynchronous=False)


@pytest.mark.parametrize("ahead", [True, False])
def test_many_requests_decode_with_fewer_drafts_than_one(ahead: bool) -> None:
    times = StepTimes([1, 8], [[10.0] * 6, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]])
    settings: dict[str, Any] = {"drafts": {"next_n": "auto"}, "oracle": {"draft_accuracy": 1.0}, "total_blocks": 99}
    engine = oracle_engine(ahead=ahead, step_times=times, **settings)
    tokens = 60
    for key in range(8):
        engine.submit(submit_of(key, prompt_of(20, key), tokens + 40 * (key == 0)))
    transcript = Transcript().run(engine)
    assert_at_rest(engine)
    yields = [len(output.token_ids) for step in transcript.steps for output in step.outputs]
    # The last request goes on alone. Drafts that were made for more requests are in flight when the number falls.
    assert set(yields[: 8 * (tokens - 2)]) == {1} and max(yields[-6:]) == 6
    # All drafts are right, and no draft that was not made counts as verified.
    assert all(step.drafts.verified == step.drafts.accepted for step in transcript.steps if step.drafts is not None)
    for key in range(8):
        expected = oracle_tokens(prompt_of(20, key), tokens + 40 * (key == 0), VOCABULARY)
        assert transcript.token_ids[key] == expected


def test_an_idle_rank_asks_for_no_drafts() -> None:
    others = Others([3])
    engine = oracle_engine(drafts={"next_n": 3}, total_blocks=9, others=others)
    engine.step()
    assert [(each.tokens, each.drafts) for each in others.proposals] == [(0, 0)]
