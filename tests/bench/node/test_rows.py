"""What was found on a node, in a file and as tables."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.node.measure import Options
from bench.node.rows import Case, Row, append_rows, read_rows
from bench.node.tables import OUTPUT_TOKENS, rates_table
from bench.rank.model import MeasuredModel
from engine.parallel.layout import Layout

PLAIN = Row(Case("tp1 dp4 ep4", 61, "w4a8", "fp8", 32), 20.0, 15.0, 16.0, 1.0, 0.01, 20.0, 90.0, 15.0, 10_000.0, {})
DRAFTED = replace(
    PLAIN, case=replace(PLAIN.case, next_n=3, acceptance=(0.8, 0.4)), step_ms=30.0, tokens=2.0, drafts=3.0
)


def test_old_lines_and_lines_with_drafts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    before = asdict(PLAIN)
    for name in ("tokens", "drafts"):
        del before[name]
    for name in ("next_n", "acceptance"):
        del before["case"][name]
    path.write_text(json.dumps(before) + "\n")
    append_rows(path, [DRAFTED])
    found = read_rows(path)
    assert found == [PLAIN, DRAFTED] and len({row.case for row in found}) == 2
    assert read_rows(tmp_path / "other") == []


def test_each_set_of_shares_is_a_case() -> None:
    options = Options(Layout(tp=4, ep=4), MeasuredModel("r1", 61, "w4a8", "fp8"), 1, 30, 8192, 3e11, None)
    cases = options.cases([1, 8], [(0.85, 0.72), (0.8, 0.4)])
    assert [(case.requests, case.acceptance) for case in cases] == [
        (1, (0.85,)),
        (8, (0.85,)),
        (1, (0.8,)),
        (8, (0.8,)),
    ]
    assert cases[0].layout == "tp4 dp1 ep4"
    plain = replace(options, next_n=0).cases([1], [(0.85,), (0.8,)])
    assert plain == [Case("tp4 dp1 ep4", 61, "w4a8", "fp8", 1)]
    assert (options.row_tokens, replace(options, next_n="auto").row_tokens) == (2, 1)


def test_a_token_takes_its_share_of_step_and_prompts() -> None:
    # 350 ms a prompt: of 32 requests one begins every 1,000 / 32 tokens.
    assert PLAIN.served(OUTPUT_TOKENS)[0] == pytest.approx(20 + 32 * 0.35)
    token_ms, per_minute = DRAFTED.served(OUTPUT_TOKENS)
    assert token_ms == pytest.approx(15 + 32 * 0.35) and per_minute == pytest.approx(32 / token_ms * 60)
    assert DRAFTED.request_rate == pytest.approx(1000 / 15)


def test_the_nodes_rates_are_those_of_all_ranks_that_batch() -> None:
    table = rates_table([DRAFTED], batching_ranks=4)
    cells = {str(column.header): next(iter(column.cells)) for column in table.columns}
    assert cells["of a request, tokens/s"] == "66.7" and cells["of the node, tokens/s"] == "8,533"
    assert cells["accepted"] == "0.8 0.4" and cells["tokens a step"] == "2.00"
    assert float(str(cells["of the node"])) == pytest.approx(4 * float(str(cells["requests/min of a rank"])), abs=0.3)
