from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.statistics import holm, mcnemar, mean_interval, mean_is_zero, two_proportions, wilson

counts = st.integers(0, 400)


# Published examples: Newcombe (1998), Statistics in Medicine 17, table I, method 3.
@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0000),
    ],
)
def test_wilson_gives_the_published_intervals(successes: int, total: int, low: float, high: float) -> None:
    interval = wilson(successes, total)
    assert interval.low == pytest.approx(low, abs=5e-5)
    assert interval.high == pytest.approx(high, abs=5e-5)


def test_an_interval_of_nothing_is_everything() -> None:
    interval = wilson(0, 0)
    assert (interval.low, interval.high) == (0.0, 1.0)


@given(counts, counts)
def test_an_interval_holds_the_share(right: int, wrong: int) -> None:
    if right + wrong == 0:
        return
    interval, mirrored = wilson(right, right + wrong), wilson(wrong, right + wrong)
    assert 0 <= interval.low <= right / (right + wrong) + 1e-12
    assert right / (right + wrong) - 1e-12 <= interval.high <= 1
    assert interval.low == pytest.approx(1 - mirrored.high, abs=1e-12)


def test_more_trials_narrow_the_interval() -> None:
    few, many = wilson(9, 10), wilson(900, 1000)
    assert many.high - many.low < (few.high - few.low) / 5


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 0.0625), (5, 0, 0.0625), (1, 9, 22 / 1024), (0, 6, 0.03125), (2, 1, 1.0)],
)
def test_mcnemar_is_the_exact_two_sided_binomial(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_does_not_care_which_is_first(first: int, second: int) -> None:
    assert mcnemar(first, second) == mcnemar(second, first)
    assert 0 < mcnemar(first, second) <= 1


def test_the_z_test_gives_the_value_of_its_formula() -> None:
    # 60/100 against 45/100: z = 0.15 / sqrt(0.525 x 0.475 x 0.02) = 2.1240, two-sided p 0.0337.
    assert two_proportions(60, 100, 45, 100) == pytest.approx(0.0337, abs=5e-5)


def test_equal_shares_do_not_differ() -> None:
    assert two_proportions(10, 10, 20, 20) == 1.0
    assert two_proportions(5, 10, 10, 20) == 1.0


def test_holm_multiplies_by_what_is_left_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.floats(0, 1), max_size=30))
def test_holm_only_raises_and_stays_a_probability(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(before <= after <= 1 for before, after in zip(p_values, adjusted, strict=True))


def test_the_interval_of_a_mean_is_that_of_its_formula() -> None:
    # Mean 3, standard deviation sqrt(2.5), five values.
    interval = mean_interval([1, 2, 3, 4, 5])
    assert interval.low == pytest.approx(3 - 1.959964 * (2.5 / 5) ** 0.5, abs=1e-6)
    assert interval.high == pytest.approx(3 + 1.959964 * (2.5 / 5) ** 0.5, abs=1e-6)


def test_a_mean_is_judged_by_its_distance_from_zero() -> None:
    assert mean_is_zero([-1.0, 1.0, -2.0, 2.0]) == 1.0
    # z = 3 / sqrt(0.5) = 4.2426
    assert mean_is_zero([1, 2, 3, 4, 5]) == pytest.approx(2.209e-5, rel=1e-3)
    assert mean_is_zero([0.0, 0.0]) == 1.0
    assert mean_is_zero([0.5, 0.5]) == 0.0


def test_the_tail_is_summed_exactly_for_many_differing_problems() -> None:
    assert mcnemar(40, 60) == pytest.approx(2 * sum(comb(100, k) for k in range(41)) / 2**100)
