import io
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.options import SESSIONS, LoadOptions
from loadgen.records import RequestRecord
from loadgen.report import Report, table
from loadgen.summary import Goodput, Objectives, distribution, elapsed, goodput, summarize, throughput_over_time

NO_OBJECTIVES = Objectives(ttft_ms=None, tpot_ms=None)


def answered(*times_s: float, scheduled_s: float = 0.0, index: int = 0) -> RequestRecord:
    """A completed request whose tokens arrived one by one at `times_s`."""
    record = RequestRecord(index, scheduled_s, max_tokens=len(times_s), woken_s=scheduled_s)
    for time_s in times_s:
        record.tokens(time_s, 1)
    record.finished_s = times_s[-1]
    record.prompt_tokens, record.output_tokens, record.cached_tokens = 10, len(times_s), 4
    return record


def failed(kind: str) -> RequestRecord:
    record = RequestRecord(0, 0.0, max_tokens=4)
    record.fail(kind, "why")
    return record


def test_percentiles_interpolate_between_the_two_nearest_ranks() -> None:
    values = distribution([0.0, 0.010, 0.020, 0.030])
    assert values is not None
    assert (values.mean, values.p50, values.max) == pytest.approx((15.0, 15.0, 30.0))
    assert (values.p90, values.p99) == pytest.approx((27.0, 29.7))


def test_a_distribution_of_nothing_is_none() -> None:
    assert distribution([]) is None


@given(st.lists(st.floats(0, 1e3), min_size=1))
def test_percentiles_are_ordered_and_within_the_values(values_s: list[float]) -> None:
    values = distribution(values_s)
    assert values is not None
    bounds = [min(values_s) * 1000, values.p50, values.p90, values.p99, values.max]
    assert all(low <= high or math.isclose(low, high) for low, high in pairwise(bounds))
    assert values.max == pytest.approx(max(values_s) * 1000)


def test_time_to_first_token_counts_from_the_scheduled_arrival() -> None:
    record = answered(3.0, scheduled_s=1.0)
    record.woken_s = 2.5
    assert record.ttft_s == 2.0


def test_time_per_token_leaves_the_first_one_out() -> None:
    assert answered(1.0, 1.1, 1.9).tpot_s == pytest.approx(0.45)


def test_tokens_that_came_in_one_message_count_as_tokens() -> None:
    record = answered(1.0, 2.0)
    record.output_tokens = 11
    assert record.tpot_s == pytest.approx(0.1)


def test_one_token_has_no_time_per_output_token() -> None:
    assert answered(1.0).tpot_s is None


def test_an_answers_time_is_divided_by_all_its_tokens() -> None:
    record = answered(2.0, 3.0, scheduled_s=1.0)
    record.output_tokens = 10
    assert record.answer_per_token_s == pytest.approx(0.2)
    assert failed("timeout").answer_per_token_s is None


def test_inter_token_latencies_are_the_gaps_between_messages() -> None:
    assert answered(1.0, 1.5, 3.0).inter_token_s == [0.5, 1.5]


def test_goodput_counts_requests_within_both_objectives() -> None:
    fast = answered(0.1, 0.2)
    slow_start = answered(0.9, 1.0)
    slow_pace = answered(0.1, 0.8)
    objectives = Objectives(ttft_ms=500, tpot_ms=300)
    assert goodput([fast, slow_start, slow_pace, failed("timeout")], objectives, elapsed_s=2.0) == Goodput(1, 0.5, 0.25)


def test_an_answer_of_one_token_keeps_the_objective_per_token() -> None:
    assert goodput([answered(0.1)], Objectives(ttft_ms=None, tpot_ms=0.001), 1.0).share == 1.0


def test_a_failed_request_is_never_good() -> None:
    assert goodput([failed("UNAVAILABLE")], NO_OBJECTIVES, 1.0).requests == 0


def test_rates_count_from_the_first_arrival_to_the_last_message() -> None:
    summary = summarize([answered(1.0, 2.0, scheduled_s=0.5), answered(3.0, 4.5, scheduled_s=2.5)], NO_OBJECTIVES)
    assert summary.elapsed_s == 4.0
    assert summary.requests_per_minute == 30.0
    assert (summary.input_tokens_per_second, summary.output_tokens_per_second) == (5.0, 1.0)
    assert summary.cached_tokens == 8


def test_errors_are_counted_by_kind() -> None:
    summary = summarize([failed("timeout"), failed("http_429"), failed("timeout"), answered(1.0)], NO_OBJECTIVES)
    assert summary.errors == {"timeout": 2, "http_429": 1}
    assert (summary.requests, summary.completed) == (4, 1)


def test_a_failed_run_has_no_latencies_and_rates() -> None:
    summary = summarize([failed("connection")], NO_OBJECTIVES)
    assert (summary.ttft_ms, summary.output_tokens_per_second, summary.goodput.share) == (None, 0.0, 0.0)


def test_the_lateness_of_the_generator_is_reported() -> None:
    record = answered(2.0, scheduled_s=1.0)
    record.woken_s = 1.25
    drift = summarize([record], NO_OBJECTIVES).drift_ms
    assert drift is not None
    assert drift.max == 250.0


def test_throughput_over_time_adds_up_to_all_tokens() -> None:
    first, second = answered(0.5, 1.0, 1.5), answered(2.0, 4.0)
    second.output_tokens = 6
    edges, rates = throughput_over_time([first, second], bins=8)
    assert np.dot(np.diff(edges), rates) == pytest.approx(9.0)
    assert (edges[0], edges[-1]) == (0.0, 4.0)


def test_a_run_without_a_message_took_no_time() -> None:
    assert elapsed([failed("connection")]) == 0.0


def test_first_turns_are_compared_with_later_ones() -> None:
    later = [answered(0.1, 0.2, scheduled_s=0.05), answered(0.3, 0.4, scheduled_s=0.2)]
    for turn, record in enumerate(later, start=2):
        record.turn = turn
        record.cached_tokens = 9
    broken = failed("lost")
    broken.turn = 2
    records = [answered(0.2, 0.3), *later, broken]
    first, others = summarize(records, NO_OBJECTIVES).by_turn
    assert [(each.requests, each.input_tokens, each.cached_tokens) for each in (first, others)] == [
        (1, 10, 4),
        (2, 20, 18),
    ]
    assert first.ttft_ms is not None and others.ttft_ms is not None
    assert (first.ttft_ms.mean, others.ttft_ms.mean) == pytest.approx((200.0, 75.0))


def test_requests_of_one_turn_are_not_split() -> None:
    assert summarize([answered(0.1)], NO_OBJECTIVES).by_turn == ()


@pytest.mark.parametrize(
    ("cached", "told"), [(6, "12 of 20 (60.0%)"), (None, "the endpoint does not say")], ids=["told", "not told"]
)
def test_the_table_tells_later_turns_hits(cached: int | None, told: str) -> None:
    records = [answered(0.1), answered(0.2), answered(0.3)]
    for record in records[1:]:
        record.turn, record.cached_tokens = 2, cached
    options = LoadOptions(grpc="127.0.0.1:1", dataset=SESSIONS)
    printed = io.StringIO()
    report = Report("2026-01-01T00:00:00", "tiny", options, summarize(records, NO_OBJECTIVES), records)
    Console(file=printed, width=160).print(table(report))
    (line,) = [line for line in printed.getvalue().splitlines() if "cached, later turns" in line]
    assert told in line
