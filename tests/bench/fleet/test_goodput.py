"""Points of a second: `python -m bench.fleet.goodput` has those that say something."""

from dataclasses import replace
from pathlib import Path

from bench.fleet.goodput import TPOT_MS, comparisons, draw, lines, measure


def test_each_case_serves_its_lowest_rate(tmp_path: Path) -> None:
    found = []
    for compared in comparisons():
        one = replace(compared, rates=compared.rates[:1])
        rows = [measure(case, rate, bound, 1.0) for case in one.cases for rate in one.rates for bound in TPOT_MS]
        assert all(row.share > 0.9 and row.tpot_p50_ms < row.tpot_ms for row in rows)
        assert sum(line.startswith("| ") for line in lines(one, rows)) == 1 + len(one.cases)
        found.append((one, rows))
    draw(found, tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
