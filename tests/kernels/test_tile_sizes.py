"""Sizes of tiles and grids."""

from hypothesis import given
from hypothesis import strategies as st

from kernels.tile_sizes import cdiv, next_power_of_2


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_cdiv_is_the_fewest_parts_that_hold_the_whole(whole: int, part: int) -> None:
    parts = cdiv(whole, part)
    assert (parts - 1) * part < whole <= parts * part


@given(st.integers(1, 2**40))
def test_the_next_power_of_2_is_the_smallest(size: int) -> None:
    power = next_power_of_2(size)
    assert power.bit_count() == 1 and size <= power < 2 * size
