from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Row
from engine.runner.graphs import graph_rows
from tests.support.checkpoints import GREEDY


def prompt_of(start: int, tokens: int, shared: int = 0) -> Row:
    """Token ids are positions."""
    return Row(list(range(start, start + tokens)), start, [0] * 9, GREEDY, shared=shared)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=6), st.integers(1, 5))
def test_graph_rows_hold_each_token_of_a_step_once(prompts: list[tuple[int, int]], width: int) -> None:
    # A batch has rows of one token first.
    prompts.sort(key=lambda each: each[0] > 1)
    rows = [prompt_of(100 * index + 1, tokens, min(shared, tokens)) for index, (tokens, shared) in enumerate(prompts)]
    computed, earlier = graph_rows(rows, width)
    assert [row.end for row in computed[earlier:]] == [row.end for row in rows]
    for part in computed:
        assert part.tokens == 1 + part.drafts <= width and part.start == part.token_ids[0]
    for part in computed[:earlier]:
        assert part.tokens == width and part.next_token == part.end
    written = [each for row in computed for each in range(row.start + row.shared, row.end)]
    assert sorted(written) == [each for row in rows for each in range(row.start + row.shared, row.end)]
    # Rows of one prompt follow one another.
    for first, second in pairwise(computed[:earlier]):
        assert first.start // 100 < second.start // 100 or first.end == second.start


def test_rows_that_decode_stay_as_they_are() -> None:
    rows = [Row([7, 8, 9], 20, [1], GREEDY, drafts=2), Row((), 30, [2], GREEDY, follows=0, drafts=1), prompt_of(40, 5)]
    computed, earlier = graph_rows(rows, 3)
    assert (computed[earlier], computed[earlier + 1]) == tuple(rows[:2])
    parts = computed[0], computed[3]
    assert [(row.token_ids, row.next_token) for row in parts] == [([40, 41, 42], 43), ([43, 44], None)]
