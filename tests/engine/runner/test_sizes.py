from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.runner.sizes import padded_size, step_sizes


@given(most=st.integers(1, 1 << 17), share=st.floats(0, 1))
def test_padding_is_below_an_eighth_or_sixteen_tokens(most: int, share: float) -> None:
    tokens = max(round(share * most), 1)
    size = padded_size(tokens, step_sizes(most))
    assert tokens <= size <= most
    assert size - tokens < max(tokens / 8, 16)


@given(most=st.integers(1, 1 << 17))
def test_sizes_ascend_to_the_largest_and_are_aligned(most: int) -> None:
    *sizes, last = step_sizes(most)
    assert last == most
    assert all(one < other for one, other in pairwise([*sizes, last]))
    assert not any(size % 16 for size in sizes)


@given(most=st.integers(1, 1 << 14), captured=st.integers(0, 1 << 14), share=st.floats(0, 1))
def test_sizes_that_are_captured_pad_by_less_than_a_quarter(most: int, captured: int, share: float) -> None:
    tokens = max(round(share * most), 1)
    sizes = step_sizes(most, captured)
    size = padded_size(tokens, sizes)
    assert tokens <= size <= most
    # The step that no longer is captured may share its size with those below it that are.
    below = max((each for each in sizes if each < tokens), default=0)
    assert size - tokens < max(tokens / (4 if below < min(captured, 512) else 8), 16)


def test_there_are_few_sizes() -> None:
    assert len(step_sizes(2048)) == 40
    assert len([size for size in step_sizes(2048, captured=1536) if size <= 1536]) == 28
    assert len(step_sizes(16384)) == 64
