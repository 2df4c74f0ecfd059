from hypothesis import given
from hypothesis import strategies as st

from launcher.restart import RestartPolicy

POLICY = RestartPolicy(first_delay_seconds=1, longest_delay_seconds=4, served_seconds=60, attempts=5)


def test_delays_double_until_it_gives_up() -> None:
    assert [POLICY.delay_seconds(ends) for ends in range(1, 6)] == [1, 2, 4, 4, None]


@given(st.integers(0, 10), st.floats(0, 59.9))
def test_ends_soon_after_each_other_are_a_row(before: int, served: float) -> None:
    assert POLICY.ends_in_row(before, served) == before + 1


@given(st.integers(0, 10), st.floats(60, 1e9))
def test_a_long_service_starts_a_new_row(before: int, served: float) -> None:
    assert POLICY.ends_in_row(before, served) == 1
