"""Exact and sparse prompts are timed apart."""

import pytest

from engine.prompt_pace import NO_PROMPTS, PromptPaceMeter, PromptTokens
from mesh.domain.workers import PromptPace


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
def test_a_chunk_is_cut_where_its_attention_begins_to_be_sparse(
    start: int, end: int, sparse_from: int | None, tokens: PromptTokens
) -> None:
    assert chunk(start, end, sparse_from) == tokens


def test_nothing_is_known_before_it_was_measured() -> None:
    meter = PromptPaceMeter()
    assert (meter.exact, meter.sparse) == (None, None)
    meter.observe(chunk(0, 1000), 1.0, 0.9)
    assert (meter.exact, meter.sparse) == (PromptPace(1000.0, 500.0), None)


def test_each_kind_has_its_pace_and_the_tokens_before_its_own() -> None:
    meter = PromptPaceMeter()
    for _ in range(10):
        meter.observe(chunk(0, 1000), 0.5, 0.9)
        meter.observe(chunk(4000, 6000, 0), 0.25, 0.9)
    assert meter.exact is not None and meter.sparse is not None
    assert (meter.exact.tokens_per_second, meter.exact.context_tokens) == pytest.approx((2000, 500))
    assert (meter.sparse.tokens_per_second, meter.sparse.context_tokens) == pytest.approx((8000, 5000))


def test_steps_of_both_kinds_change_neither_pace_while_they_take_what_both_take_together() -> None:
    meter = PromptPaceMeter()
    meter.observe(chunk(0, 1000), 0.5, 0.9)
    meter.observe(chunk(4000, 6000, 0), 0.25, 0.9)
    for _ in range(100):
        meter.observe(chunk(0, 1000).with_chunk(4000, 6000, 0), 0.75, 0.9)
    assert meter.exact is not None and meter.exact.tokens_per_second == pytest.approx(2000)
    assert meter.sparse is not None and meter.sparse.tokens_per_second == pytest.approx(8000)


def test_a_worker_whose_steps_all_have_both_kinds_measures_one_rate() -> None:
    meter = PromptPaceMeter()
    for _ in range(10):
        meter.observe(chunk(0, 1000, 500), 0.5, 0.9)
    assert meter.exact is not None and meter.exact.tokens_per_second == pytest.approx(2000)
    assert meter.sparse is not None and meter.sparse.tokens_per_second == pytest.approx(2000)


def test_a_change_of_both_is_found_in_steps_of_both() -> None:
    """All becomes half as fast, and a long prompt leaves no step without it."""
    meter = PromptPaceMeter()
    meter.observe(chunk(0, 1000), 0.5, 0.9)
    meter.observe(chunk(4000, 6000, 0), 0.25, 0.9)
    for _ in range(200):
        meter.observe(chunk(0, 1000).with_chunk(4000, 6000, 0), 1.5, 0.9)
    assert meter.exact is not None and meter.exact.tokens_per_second == pytest.approx(1000, rel=0.01)
    assert meter.sparse is not None and meter.sparse.tokens_per_second == pytest.approx(4000, rel=0.01)
