"""Which tokens decode rows compute, and where these lie; Triton's kernels against the definition."""

from typing import Any

import pytest
import torch

from kernels.decode_rows import FILLER, NO_TOKEN, follow_rows, place_tokens, reference
from kernels.rope import frequencies, rotation_table

triton = pytest.importorskip("kernels.decode_rows.triton")
PAIRS, BLOCKS, POSITIONS = 12, 4, 256
ROTATIONS = rotation_table(frequencies(2 * PAIRS, 10000.0), POSITIONS)


def draw_rows(rows: int, count: int) -> tuple[torch.Tensor, ...]:
    """Their tokens lie in a wider tensor, and their blocks in a wider table. Some of their first
    tokens have KV already.
    """
    token_ids = torch.randint(-1, 500, (rows, count + 2))[:, 1 : 1 + count]
    starts = torch.randint(POSITIONS - count, (rows,), dtype=torch.int32)
    table = torch.randint(90, (rows, BLOCKS + 3), dtype=torch.int32)[:, :BLOCKS]
    return token_ids, starts, table, torch.rand(rows) < 0.7, torch.randint(1 + count, (rows,), dtype=torch.int32)


def test_tokens_follow_each_other_in_the_blocks_of_their_positions() -> None:
    table = torch.tensor([[7, 3], [5, 9]], dtype=torch.int32)
    token_ids, starts = torch.tensor([[11, -1], [13, 14]]), torch.tensor([63, 2], dtype=torch.int32)
    placed = place_tokens(token_ids, starts, table, torch.tensor([True, False]), None, ROTATIONS, 0)
    assert placed.token_ids.tolist() == [11, 0, 13, 14]
    assert placed.slots.tolist() == [7 * 64 + 63, 3 * 64, 5 * 64 + 2, 5 * 64 + 3]
    assert placed.real.tolist() == [True, True, False, False]
    assert placed.lengths.tolist() == [65, 4]
    assert torch.equal(placed.rotations, ROTATIONS[[63, 64, 2, 3]])


def test_kv_that_exists_is_not_written_again() -> None:
    table, starts = torch.tensor([[7, 3], [5, 9]], dtype=torch.int32), torch.tensor([62, 2], dtype=torch.int32)
    token_ids, shared = torch.ones(2, 3, dtype=torch.int64), torch.tensor([2, 0], dtype=torch.int32)
    placed = place_tokens(token_ids, starts, table, torch.tensor([True, True]), shared, ROTATIONS, 11 * 64)
    assert placed.slots.tolist() == [11 * 64, 11 * 64, 3 * 64, 5 * 64 + 2, 5 * 64 + 3, 5 * 64 + 4]
    assert placed.lengths.tolist() == [65, 5] and placed.real.all()


@pytest.mark.parametrize("writes_all", [False, True])
@pytest.mark.parametrize(("rows", "count"), [(0, 2), (1, 1), (5, 1), (7, 4)])
def test_tokens_are_placed_as_defined(device: torch.device, rows: int, count: int, writes_all: bool) -> None:
    *drawn, shared = (each.to(device) for each in draw_rows(rows, count))
    given: tuple[Any, ...] = (*drawn, None if writes_all else shared, ROTATIONS.to(device), 17 * 64)
    found, expected = (place(*given) for place in (triton.place_tokens, reference.place_tokens))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        # Kernels read the result as contiguous.
        assert one.is_contiguous()


def test_a_row_continues_the_one_before_with_its_guesses() -> None:
    drawn, missing = torch.tensor([50, 60, 70]), torch.tensor([0, 2, 1], dtype=torch.int32)
    guessed = torch.tensor([[51, 52, 53], [61, 62, 63], [71, NO_TOKEN, NO_TOKEN]])
    given = torch.tensor([[7, 8, NO_TOKEN], [0, 0, 0], [0, 0, 0], [0, NO_TOKEN, NO_TOKEN]], dtype=torch.int32)
    follows, drafts = (torch.tensor(each, dtype=torch.int32) for each in ([-1, 1, 2, FILLER], [1, 2, 1, 0]))
    positions = torch.tensor([100, 200, 150, 0], dtype=torch.int32)
    table, shared = torch.arange(4 * BLOCKS, dtype=torch.int32).view(4, BLOCKS), torch.zeros(4, dtype=torch.int32)
    tensors = given, follows, positions, drafts, drawn, missing, guessed
    rows, placed = follow_rows(*tensors, shared, table, ROTATIONS, 17 * 64)
    assert placed.lengths.tolist() == [103, 201, 152, 3] and placed.slots[0] == 1 * 64 + 36
    assert rows.token_ids.tolist() == [[7, 8, -1], [60, 61, 62], [70, 71, -1], [0, -1, -1]]
    assert rows.starts.tolist() == [100, 198, 149, 0] and rows.real.tolist() == [True, True, True, False]


@pytest.mark.parametrize(("rows", "drafts", "most"), [(0, 1, 1), (4, 0, 0), (5, 0, 3), (40, 2, 2), (9, 3, 5)])
def test_rows_follow_as_defined(device: torch.device, rows: int, drafts: int, most: int) -> None:
    def draw(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(low, high, shape, device=device, dtype=dtype)

    state = draw(0, 99, 6, dtype=torch.int64), draw(0, 1 + most, 6), draw(-1, 99, 6, most, dtype=torch.int64)
    given = draw(-1, 99, rows, 1 + drafts), draw(-2, 6, rows), draw(9, 99, rows), draw(0, 1 + drafts, rows), *state
    shared, table = draw(0, 2, rows), draw(0, 90, rows, BLOCKS + 3)[:, :BLOCKS]
    rotations, padding = ROTATIONS.to(device), 17 * 64
    found, placed = triton.follow_rows(*given, shared, table, rotations, padding)
    followed = reference.follow_rows(*given)
    token_ids, starts, real = followed
    expected = reference.place_tokens(token_ids, starts, table, real, shared, rotations, padding)
    for one, other in zip((*found, *placed), (*followed, *expected), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
