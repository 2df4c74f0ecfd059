"""What `bench.meshes.http_peers` takes, and how it compares servers."""

import argparse

import pytest

from bench.meshes.http_peers import Lengths, Row, Server, ratio, table_of


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
