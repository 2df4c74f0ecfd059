"""Tilings of the INT4 experts' product: how they are chosen, measured and kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.fp8_gemm.few_rows import choose_tiling
from kernels.w4a8_gemm.profile import ROWS, find_or_measure, measure_table
from kernels.w4a8_gemm.tiling import H200, NARROW, SPARE, SPARE_OF_FEW, SPARE_OF_SOME, TILINGS, Tiling, narrowed, spared


@pytest.mark.parametrize(("rows", "expected"), [(1, 16), (8, 24), (16, 32), (32, 128), (4096, 128)])
def test_a_tile_holds_most_experts_rows(rows: int, expected: int) -> None:
    assert H200.choose(rows, 8192).rows == expected


def test_a_tile_holds_no_more_than_an_expert_can_have() -> None:
    assert H200.choose(60, 32).rows == 32


@pytest.mark.parametrize(
    ("width", "touched", "narrow"),
    [(2048, 1, True), (2048, 5, True), (2048, 6, False), (2048, 8, False), (512, 8, True), (512, 16, False)],
)
def test_tiles_are_narrow_where_that_was_measured_to_be_faster(width: int, touched: int, narrow: bool) -> None:
    found = narrowed(TILINGS[0], (2 * width, 7168), touched, divided=False)
    assert found == (NARROW if narrow else TILINGS[0])


@pytest.mark.parametrize(("tokens", "narrow"), [(1, True), (2, False), (4, False)])
def test_the_busiest_rank_expects_more_than_its_share(tokens: int, narrow: bool) -> None:
    # Each token chooses eight experts of four ranks.
    found = narrowed(TILINGS[0], (4096, 7168), 2 * tokens, divided=True)
    assert found == (NARROW if narrow else TILINGS[0])


def test_tiles_for_more_rows_are_narrowed_if_few_have_come() -> None:
    # Tables that are measured may have a larger first tile: tiles of 16 and of 24 rows take the same time for one.
    assert narrowed(TILINGS[1], (1024, 7168), 8, divided=False) == NARROW


def test_rows_beyond_a_narrow_tile_keep_wide_tiles() -> None:
    assert narrowed(TILINGS[1], (512, 512), 17, divided=False) == TILINGS[1]


def test_turns_of_narrow_tiles_have_equally_many_groups() -> None:
    # The last product has five groups of inputs, then the first one has.
    assert narrowed(TILINGS[0], (1280, 1024), 1, divided=False) == TILINGS[0]
    assert narrowed(TILINGS[0], (1024, 640), 1, divided=False) == TILINGS[0]


# Both products of one of DeepSeek-R1's experts.
EXPERT_BYTES = 3 * 7168 * 2048 * 33 // 64


@pytest.mark.parametrize(
    ("copies", "expert_bytes", "experts", "expected"),
    [
        # Each token chooses eight experts. Four ranks that each hold a quarter of the experts.
        pytest.param(2, EXPERT_BYTES, 64, SPARE_OF_FEW, id="four ranks, 1 request in all"),
        pytest.param(32, EXPERT_BYTES, 64, SPARE_OF_FEW, id="four ranks, 16 requests in all"),
        pytest.param(64, EXPERT_BYTES, 64, SPARE, id="four ranks, 32 requests in all"),
        # Four ranks that each hold a quarter of every expert's width.
        pytest.param(8, EXPERT_BYTES // 4, 256, SPARE_OF_FEW, id="divided width, 1 request"),
        pytest.param(256, EXPERT_BYTES // 4, 256, SPARE, id="divided width, 32 requests"),
        pytest.param(32, EXPERT_BYTES, 32, SPARE_OF_FEW, id="eight ranks, 4 requests each"),
        pytest.param(256, EXPERT_BYTES, 32, SPARE_OF_SOME, id="eight ranks, 32 requests each"),
    ],
)
def test_shared_experts_get_room_to_end_with_the_others(
    copies: float, expert_bytes: int, experts: int, expected: int
) -> None:
    assert spared(copies, expert_bytes, experts) == expected


def test_shared_experts_of_few_copies_all_run_at_once() -> None:
    # Gate and up of one of four ranks, and of a rank that has them whole.
    for outputs in (1024, 4096):
        tiling = choose_tiling(outputs, 7168, shares_chip=True)
        assert tiling is not None and tiling.tiles(outputs) * tiling.ctas <= SPARE_OF_FEW


def fitting(slack: float) -> Callable[[int, Tiling], float]:
    """Seconds on a card where a tile costs as many as it has rows, or 40 times that if rows times slack do not fit."""
    return lambda rows, tiling: tiling.rows * (1 if rows * slack <= tiling.rows else 40)


@pytest.mark.parametrize("slack", [0.7, 1.0, 1.3])
def test_the_fastest_tiling_is_chosen_for_measured_rows(slack: float) -> None:
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
