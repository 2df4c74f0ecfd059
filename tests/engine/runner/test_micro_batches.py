"""How a step's rows become micro-batches, of sizes that all ranks know."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Row
from engine.runner.micro_batches import MicroBatches, halves
from engine.runner.sizes import padded_size, step_sizes
from engine.step.shape import StepShape, shape_of
from engine.step.two_batch import ALWAYS, NEVER, TwoBatch
from tests.support.checkpoints import GREEDY

SIZES = step_sizes(4096)
BLOCKS = [3, 4, 5, 6]


def exact(tokens: int) -> int:
    return tokens


def padded(tokens: int) -> int:
    return padded_size(tokens, SIZES)


def prompt(tokens: int, start: int = 0, shared: int = 0) -> Row:
    return Row(list(range(start, start + tokens)), start, BLOCKS, GREEDY, shared=shared)


def decoding(drafts: int = 0) -> Row:
    return Row(range(1 + drafts), 9, BLOCKS, GREEDY, drafts=drafts)


def lengths(rows: Sequence[Row]) -> list[int]:
    return [row.tokens for row in rows]


def halved(rows: Sequence[Row], tokens: int | None = None) -> list[list[int]]:
    shape = shape_of(rows) if tokens is None else StepShape(tokens)
    return [lengths(batch.rows) for batch in halves(rows, shape, exact)]


def test_half_of_the_rows_decode_in_each_micro_batch() -> None:
    assert halved([decoding()] * 5) == [[1, 1, 1], [1, 1]]


def test_a_prompt_is_cut_where_half_of_the_tokens_are() -> None:
    first, second = halves([decoding(), prompt(6, start=64, shared=4)], StepShape(7), exact)
    assert first.rows[0] == decoding() and len(first.rows) == 2
    assert first.rows[1] == Row([64, 65, 66], 64, BLOCKS, None, shared=3)
    assert second.rows == [Row([67, 68, 69], 67, BLOCKS, GREEDY, shared=1)]


def test_prompts_stay_whole_if_halves_are_about_even() -> None:
    prompts = [prompt(300), prompt(270), prompt(230)]
    assert halved(prompts) == [[300, 100], [170, 230]]
    # Another rank has more tokens, so that there is room to cut between prompts.
    assert halved([prompt(300), prompt(315)], tokens=700) == [[300], [315]]
    assert halved([prompt(300), prompt(500)], tokens=900) == [[300, 100], [400]]


def test_drafts_stay_with_the_token_before_them() -> None:
    rows = [decoding(3)] * 3
    assert halved(rows) == [[4], [4, 4]]
    assert [batch.size for batch in halves(rows, shape_of(rows), exact)] == [6, 9]


def test_a_rank_without_work_pads_both_micro_batches() -> None:
    batches = halves([], StepShape(9), exact)
    assert [(batch.rows, batch.size) for batch in batches] == [([], 5), ([], 4)]


@given(
    st.integers(0, 4),
    st.lists(st.integers(0, 4)),
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 90), st.integers(0, 80))),
    st.integers(0, 500),
    st.booleans(),
)
def test_micro_batches_hold_a_steps_tokens_in_order(
    most_drafts: int, drafts: list[int], prompts: list[tuple[int, int, int]], others: int, pads: bool
) -> None:
    """Sizes depend on the agreed shape alone, not on what this rank computes."""
    rows = [decoding(min(count, most_drafts)) for count in sorted(drafts)]
    rows += [prompt(tokens, start, min(shared, tokens)) for tokens, start, shared in prompts]
    shape = StepShape(max(sum(lengths(rows)), 2) + others, drafts=most_drafts)
    size = padded if pads else exact
    batches = halves(rows, shape, size)
    assert [batch.size for batch in batches] == [batch.size for batch in halves([], shape, size)]
    assert all(sum(lengths(batch.rows)) <= batch.size for batch in batches)
    one, two = (sum(lengths(batch.rows)) for batch in batches)
    # The cut may lie a sixteenth of the tokens off the middle, and the middle half a token off.
    assert abs(one - two) <= max(1 + 2 * most_drafts, (one + two) / 8 + 1)
    joined: list[Row] = []
    for row in [*batches[0].rows, *batches[1].rows]:
        before = joined[-1] if joined else None
        if before is not None and before.sampling is None:
            assert before.end == row.start and before.block_ids is row.block_ids
            token_ids = [*before.token_ids, *row.token_ids]
            joined[-1] = Row(token_ids, before.start, row.block_ids, row.sampling, shared=before.shared + row.shared)
        else:
            joined.append(row)
    assert joined == rows


@pytest.mark.parametrize(
    ("two_batch", "sizes"),
    [(NEVER, [112]), (ALWAYS, [64, 64]), (TwoBatch(prompts=[(64, False), (256, True)]), [64, 64])],
)
def test_a_step_is_halved_by_its_kind_and_size(two_batch: TwoBatch, sizes: list[int]) -> None:
    batches = MicroBatches(two_batch, padded)
    assert [batch.size for batch in batches.of([prompt(100)], StepShape(100, decode_only=False))] == sizes


def test_a_token_count_takes_the_next_measured_choice() -> None:
    chosen = TwoBatch(decoding=[(64, False), (128, True), (256, False)], prompts=[(512, True)])
    wanted = {tokens: chosen.wanted(tokens, decode_only=True) for tokens in (1, 2, 64, 65, 128, 129, 999)}
    assert [tokens for tokens, two in wanted.items() if two] == [65, 128]
    assert chosen.wanted(2, decode_only=False) and chosen.wanted(9999, decode_only=False)
    assert not any(each.wanted(1, decode_only=only) for each in (ALWAYS, chosen) for only in (True, False))
