"""What `bench.meshes.http_peers` takes, and how it compares servers."""

import argparse

import pytest

from bench.meshes.http_peers import Lengths, Row, Server, ratio, rows_of, table_of
from loadgen.options import LoadOptions
from loadgen.records import RequestRecord
from loadgen.report import Report
from loadgen.summary import Objectives, summarize


@pytest.mark.parametrize("text", ["vllm", "vllm=vllm serve DIR", "=vllm --port {port}"])
def test_a_server_needs_a_name_and_a_port(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=COMMAND"):
        Server.parse(text)


@pytest.mark.parametrize("text", ["1000", "1000/1", "0/300", "a/b", "-1/300"])
def test_lengths_are_two_numbers_of_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="PROMPT/ANSWER"):
        Lengths.parse(text)


@pytest.mark.parametrize(
    ("more_is_better", "expected"), [(True, 2.0), (False, 0.5)], ids=["tokens a second", "milliseconds"]
)
def test_a_ratio_above_one_is_the_first_servers(more_is_better: bool, expected: float) -> None:
    ours, theirs = Row("load", "figure", 20.0, more_is_better), Row("load", "figure", 10.0, more_is_better)
    assert ratio(ours, theirs) == expected


def test_the_table_has_a_ratio_to_each_other_server() -> None:
    rows = [Row("load", "tokens/s", 10.0, more_is_better=True)]
    table = table_of({"ours": rows, "a": rows, "b": [Row("load", "tokens/s", 5.0, more_is_better=True)]})
    cells = {column.header: list(column.cells) for column in table.columns}
    assert cells["ours : a"] == ["1.00"] and cells["ours : b"] == ["2.00"]


def loaded(*gaps_s: float) -> Report:
    """One request after another, each with three tokens as far apart as its `gaps_s` says."""
    options = LoadOptions(url="http://127.0.0.1:1/v1", ttft_slo_ms=2000.0, tpot_slo_ms=50.0)
    records = [RequestRecord(number, float(number), 3) for number in range(len(gaps_s))]
    for record, gap_s in zip(records, gaps_s, strict=True):
        for token in range(3):
            record.tokens(record.scheduled_s + 0.5 + token * gap_s, 1)
        record.finished_s = record.message_times_s[-1]
    return Report("now", "model", options, summarize(records, Objectives(2000.0, 50.0)), records, False)


def test_a_load_tells_how_even_its_tokens_come() -> None:
    found = {row.figure: row.value for row in rows_of("load", loaded(0.01, 0.01, 0.01, 0.01, 0.03))}
    assert found["between tokens, p50, ms"] == pytest.approx(10)
    assert found["between tokens, p99 over p50"] == pytest.approx(3)
    assert found["TTFT, p50, ms"] == pytest.approx(500)


def test_a_load_tells_its_first_requests_from_its_last() -> None:
    found = {row.figure: row.value for row in rows_of("load", loaded(0.06, 0.01, 0.01, 0.01, 0.01))}
    assert (found["good of the first fifth, %"], found["good of the last fifth, %"]) == (0, 100)
    assert found["good, %"] == 80
    assert found["time per token of the first fifth, p50, ms"] == pytest.approx(60)
