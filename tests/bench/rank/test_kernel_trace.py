import pytest

from bench.rank.kernel_trace import Interval, KernelTrace

TRACE = KernelTrace([Interval("gemm a", 0, 10), Interval("norm", 5, 15), Interval("gemm b", 20, 40)])


def test_idle_is_when_no_kernel_runs() -> None:
    assert TRACE.span == 40
    assert TRACE.idle_share == pytest.approx(5 / 40)


def test_kernels_are_summed_by_the_first_pattern_that_matches() -> None:
    assert TRACE.by_group({"products": "gemm", "all": "."}) == {"products": 30, "all": 5}


def test_a_kernel_counts_from_the_end_before_it() -> None:
    waiting = KernelTrace([Interval("long", 0, 100), Interval("beside", 10, 20), Interval("waits", 30, 110)])
    assert list(waiting.added()) == [("long", 100), ("beside", 0), ("waits", 10)]
    assert waiting.by_name() == {"long": (1, 100), "waits": (1, 10), "beside": (1, 0)}


def test_kernels_of_two_streams_count_in_full_each() -> None:
    shared = KernelTrace([Interval("shared", 0, 90, stream=1), Interval("routed", 1, 100), Interval("next", 95, 103)])
    assert list(shared.added()) == [("shared", 90), ("routed", 99), ("next", 3)]


def test_a_kernel_of_no_group_keeps_its_name() -> None:
    assert TRACE.by_group({"products": "gemm"}) == {"products": 30, "other: norm": 5}
