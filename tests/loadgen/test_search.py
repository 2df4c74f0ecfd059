"""The highest rate that keeps the objectives, of an endpoint whose answers take longer the more requests come."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadgen.options import LoadOptions
from loadgen.records import RequestRecord
from loadgen.report import Report
from loadgen.run import main
from loadgen.search import MOST_TRIALS, PRECISION, find_rate, line, next_rate, table
from loadgen.summary import Objectives, summarize
from mesh.config_values import validate
from mesh.errors import ConfigError


def options(**values: Any) -> LoadOptions:
    given = {"grpc": "127.0.0.1:1", "rate": 1.0, "duration_s": 10.0, "tpot_slo_ms": 50.0, "find_rate": True}
    return validate(LoadOptions, given | values, "bench")


def answered(pace_s: float) -> RequestRecord:
    record = RequestRecord(0, 0.0, max_tokens=3)
    for token in range(3):
        record.tokens(1 + token * pace_s, 1)
    record.finished_s = record.message_times_s[-1]
    return record


def endpoint(most: float) -> Callable[[LoadOptions], Report]:
    """It has a token every 40 ms up to this many requests a second, and every 80 above."""
    seeds: set[int] = set()

    def run(options: LoadOptions) -> Report:
        # Equal prompts would be found in caches.
        assert options.seed not in seeds
        seeds.add(options.seed)
        records = [answered(0.04 if options.rate <= most else 0.08) for _ in range(10)]
        summary = summarize(records, Objectives(options.ttft_slo_ms, options.tpot_slo_ms))
        return Report("2026-01-01T00:00:00", "tiny", options, summary, records)

    return run


@pytest.mark.parametrize("most", [0.2, 0.99, 1.0, 3.7, 40.0, 1000.0])
def test_the_highest_rate_is_found_to_within_a_tenth(most: float) -> None:
    found = find_rate(options(), endpoint(most))
    assert most / PRECISION <= found.best.options.rate <= most
    assert len(found.trials) <= MOST_TRIALS
    assert len(table(found).rows) == len(found.trials)


def test_low_rates_are_tried_for_longer() -> None:
    times = {each.options.rate: each.options.duration_s for each in find_rate(options(), endpoint(0.3)).trials}
    assert times[1.0] == 30 and times[0.5] == 60
    assert find_rate(options(rate=8.0), endpoint(100.0)).trials[0].options.duration_s == 10


def test_an_endpoint_that_never_keeps_them_ends_the_search() -> None:
    found = find_rate(options(), endpoint(0.0))
    assert len(found.trials) == MOST_TRIALS and found.best is found.trials[-1]


def test_a_rate_missed_by_chance_bounds_no_search() -> None:
    assert next_rate([(1.0, True), (2.0, False), (1.4, True), (4.0, True)], 1.0) == 8.0


def test_a_coarse_search_ends_sooner() -> None:
    tried = [(1.0, True), (2.0, False)]
    assert next_rate(tried, 1.0, precision=1.5) == pytest.approx(2**0.5)
    assert next_rate(tried, 1.0, precision=2.0) is None


def test_a_search_has_the_usual_objectives_unless_told() -> None:
    alone = options(tpot_slo_ms=None, duration_s=None)
    assert (alone.ttft_slo_ms, alone.tpot_slo_ms, alone.duration_s) == (2000, 50, 60)
    assert options().ttft_slo_ms is None


def test_one_line_has_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = endpoint(1.0)
    monkeypatch.setattr("loadgen.run.run_load", lambda trial, console: run(trial))
    printed = io.StringIO()
    main(options(ttft_slo_ms=2000.0, output=tmp_path / "load.json"), Console(file=printed, width=40))
    # Each answer takes 1.08 s, and has 3 tokens.
    expected = "60.0 requests a minute (the first token in 2000 ms, one every 50 ms: 100.0%); whole answers take"
    assert printed.getvalue().splitlines()[-1] == f"{expected} 360.0 ms a token at p90"


def test_a_search_without_a_result_says_so() -> None:
    told = line(find_rate(options(), endpoint(0.0)))
    assert told.startswith("no rate found (one every 50 ms): ") and told.endswith("requests a second are too many")


@pytest.mark.parametrize(
    ("values", "reason"), [({"requests": 30}, "leave requests out"), ({"good_share": 0}, "good_share")]
)
def test_what_a_search_needs_is_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options(**values)
