import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.channel import hop_timeout


def test_no_deadline_gives_the_default() -> None:
    assert hop_timeout(None, 5.0) == 5.0


def test_a_long_deadline_gives_the_default() -> None:
    assert hop_timeout(3600.0, 5.0) == 5.0


def test_a_near_deadline_leaves_time_to_report_it() -> None:
    assert hop_timeout(1.0, 5.0) == pytest.approx(0.9)


@given(st.floats(-10, 1e6), st.floats(0.001, 1e6))
def test_a_hop_never_outlives_its_caller_nor_goes_below_zero(remaining: float, default: float) -> None:
    timeout = hop_timeout(remaining, default)
    assert 0 <= timeout <= max(remaining, 0) and timeout <= default
