"""Exact and sparse prompts are timed apart."""

from collections.abc import Sequence

import pytest

from engine.config import SparsePrefillConfig
from engine.engine import Engine
from engine.pace.step_meter import NO_PROMPTS, PromptPaceMeter, PromptTokens
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.workers import PromptPace
from tests.support.engines import Transcript, oracle_engine, prompt_of, submit_of


def chunk(start: int, end: int, sparse_from: int | None = None) -> PromptTokens:
    return NO_PROMPTS.with_chunk(start, end, sparse_from)


@pytest.mark.parametrize(
    ("start", "end", "sparse_from", "tokens"),
    [
        (0, 100, None, PromptTokens(100, 0, 100 * 50)),
        (100, 200, None, PromptTokens(100, 0, 100 * 150)),
        (0, 100, 100, PromptTokens(100, 0, 100 * 50)),
        (100, 200, 100, PromptTokens(0, 100, 0, 100 * 150)),
        (0, 200, 100, PromptTokens(100, 100, 100 * 50, 100 * 150)),
        (0, 200, 0, PromptTokens(0, 200, 0, 200 * 100)),
    ],
)
def test_a_chunk_is_cut_where_sparse_attention_begins(
    start: int, end: int, sparse_from: int | None, tokens: PromptTokens
) -> None:
    assert chunk(start, end, sparse_from) == tokens


def test_nothing_is_known_before_it_was_measured() -> None:
    meter = PromptPaceMeter()
    assert (meter.exact, meter.sparse) == (None, None)
    meter.observe(chunk(0, 1000), 1.0, 0.9)
    assert (meter.exact, meter.sparse) == (PromptPace(1000.0, 500.0, 1000.0), None)


def test_each_kind_of_prompt_has_its_own_pace() -> None:
    meter = PromptPaceMeter()
    for _ in range(10):
        meter.observe(chunk(0, 1000), 0.5, 0.9)
        meter.observe(chunk(4000, 6000, 0), 0.25, 0.9)
    assert meter.exact is not None and meter.sparse is not None
    assert (meter.exact.tokens_per_second, meter.exact.context_tokens) == pytest.approx((2000, 500))
    assert (meter.sparse.tokens_per_second, meter.sparse.context_tokens) == pytest.approx((8000, 5000))


def test_mixed_steps_that_take_as_expected_change_no_pace() -> None:
    meter = PromptPaceMeter()
    meter.observe(chunk(0, 1000), 0.5, 0.9)
    meter.observe(chunk(4000, 6000, 0), 0.25, 0.9)
    for _ in range(100):
        meter.observe(chunk(0, 1000).with_chunk(4000, 6000, 0), 0.75, 0.9)
    assert meter.exact is not None and meter.exact.tokens_per_second == pytest.approx(2000)
    assert meter.sparse is not None and meter.sparse.tokens_per_second == pytest.approx(8000)


def test_a_pace_knows_the_tokens_of_a_usual_step() -> None:
    meter = PromptPaceMeter()
    meter.observe(chunk(0, 1500), 0.75, 1.0)
    meter.observe(chunk(0, 500), 0.25, 1.0)
    assert meter.exact is not None and meter.exact.step_tokens == pytest.approx(1000)
    # Half of the time of this step is that of sparse tokens, as all take equally long until both kinds are known.
    meter.observe(chunk(0, 1000).with_chunk(4000, 5000, 0), 1.0, 1.0)
    assert meter.exact.step_tokens == pytest.approx(3000 / 2.5)
    assert meter.sparse is not None and meter.sparse.step_tokens == pytest.approx(1000 / 0.5)


def test_steps_that_all_have_both_kinds_give_one_rate() -> None:
    meter = PromptPaceMeter()
    for _ in range(10):
        meter.observe(chunk(0, 1000, 500), 0.5, 0.9)
    assert meter.exact is not None and meter.exact.tokens_per_second == pytest.approx(2000)
    assert meter.sparse is not None and meter.sparse.tokens_per_second == pytest.approx(2000)


def test_a_change_of_both_is_found_in_steps_of_both() -> None:
    """Everything becomes half as fast while every step has tokens of a long prompt."""
    meter = PromptPaceMeter()
    meter.observe(chunk(0, 1000), 0.5, 0.9)
    meter.observe(chunk(4000, 6000, 0), 0.25, 0.9)
    for _ in range(200):
        meter.observe(chunk(0, 1000).with_chunk(4000, 6000, 0), 1.5, 0.9)
    assert meter.exact is not None and meter.exact.tokens_per_second == pytest.approx(1000, rel=0.01)
    assert meter.sparse is not None and meter.sparse.tokens_per_second == pytest.approx(4000, rel=0.01)


@pytest.mark.parametrize("offers", [True, False])
def test_an_engine_reports_tokens_that_will_attend_sparsely(offers: bool) -> None:
    """There is a prompt of 256 tokens, sparse from 128 on if the engine offers that, and an exact one after it."""
    sparse = SparsePrefillConfig(recall=0.9 if offers else None, from_tokens=128)
    engine = oracle_engine(max_requests=1, max_step_tokens=64, sparse_prefill=sparse)
    engine.submit(submit_of(0, prompt_of(256, seed=1), 1, sparse=SparsePrefill(128, 0.9)))
    engine.submit(submit_of(1, prompt_of(320, seed=2), 1))
    queued = [engine.load().queued_sparse_tokens]
    for _ in range(5):
        engine.step()
        queued.append(engine.load().queued_sparse_tokens)
    load = engine.load()
    assert load.exact_prompts is not None
    if offers:
        assert queued == [128, 128, 128, 64, 0, 0]
        assert load.sparse_prompts is not None and load.sparse_prompts.context_tokens == pytest.approx(192, abs=1)
    else:
        assert queued == [0] * 6 and load.sparse_prompts is None


def test_a_waiting_prompts_cached_tokens_are_not_counted() -> None:
    engine = oracle_engine(sparse_prefill=SparsePrefillConfig(recall=0.9, from_tokens=128))
    prompt, sparse = prompt_of(320), SparsePrefill(128, 0.9)
    Transcript().run(_given(engine, 0, prompt[:257], sparse))
    assert _given(engine, 1, prompt, sparse).load().queued_sparse_tokens == 320 - 256


def _given(engine: Engine, key: int, prompt: Sequence[int], sparse: SparsePrefill) -> Engine:
    engine.submit(submit_of(key, prompt, 1, sparse=sparse))
    return engine
