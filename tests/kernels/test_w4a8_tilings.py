"""Tilings of the INT4 experts' product: how they are chosen, measured and kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.w4a8_gemm.profile import ROWS, find_or_measure, measure_table
from kernels.w4a8_gemm.tiling import H200, TILINGS, Tiling


@pytest.mark.parametrize(("rows", "expected"), [(1, 16), (8, 24), (16, 32), (32, 128), (4096, 128)])
def test_a_tile_holds_most_experts_rows(rows: int, expected: int) -> None:
    assert H200.choose(rows, 8192).rows == expected


def test_a_tile_holds_no_more_than_an_expert_can_have() -> None:
    assert H200.choose(60, 32).rows == 32


def fitting(slack: float) -> Callable[[int, Tiling], float]:
    """Seconds of a card on which each tile costs its rows, and all rows are to fit with some slack."""
    return lambda rows, tiling: tiling.rows * (1 if rows * slack <= tiling.rows else 40)


@pytest.mark.parametrize("slack", [0.7, 1.0, 1.3])
def test_the_fastest_tiling_is_chosen_at_every_measured_number_of_rows(slack: float) -> None:
    measure = fitting(slack)
    table = measure_table(measure)
    for rows in ROWS:
        assert measure(rows, table.choose(rows, 8192)) == min(measure(rows, tiling) for tiling in TILINGS)


def test_more_rows_never_get_a_smaller_tile() -> None:
    table = measure_table(lambda rows, tiling: -tiling.rows if rows == 12 else tiling.rows)
    chosen = [table.choose(rows, 8192).rows for rows in range(1, 200)]
    assert chosen == sorted(chosen)


def test_tables_are_measured_once_and_kept(tmp_path: Path) -> None:
    file, measured = tmp_path / "cache" / "tables.json", []

    def measure(rows: int, tiling: Tiling) -> float:
        measured.append(rows)
        return fitting(1.0)(rows, tiling)

    first = find_or_measure(file, "32x4096x7168", measure)
    count = len(measured)
    other = find_or_measure(file, "32x7168x2048", lambda rows, tiling: tiling.rows)
    assert find_or_measure(file, "32x4096x7168", measure) == first != other and len(measured) == count
    assert list(file.parent.iterdir()) == [file]


def test_a_broken_file_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    file.write_text('{"32x40')
    table = find_or_measure(file, "32x4096x7168", fitting(1.0))
    assert find_or_measure(file, "32x4096x7168", lambda *_: pytest.fail("measured twice")) == table


def test_a_folder_that_takes_no_files_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    table = find_or_measure(tmp_path / "cache" / "tables.json", "32x4096x7168", fitting(1.0))
    assert table == measure_table(fitting(1.0))
