import pytest

from bench.kernel_trace import Interval, KernelTrace

TRACE = KernelTrace([Interval("gemm a", 0, 10), Interval("norm", 5, 15), Interval("gemm b", 20, 40)])


def test_idle_is_when_no_kernel_runs() -> None:
    assert TRACE.span == 40
    assert TRACE.idle_share == pytest.approx(5 / 40)


def test_kernels_are_summed_by_the_first_pattern_that_matches() -> None:
    assert TRACE.by_group({"products": "gemm", "all": "."}) == {"products": 30, "all": 10}


def test_a_kernel_of_no_group_keeps_its_name() -> None:
    assert TRACE.by_group({"products": "gemm"}) == {"products": 30, "other: norm": 10}
