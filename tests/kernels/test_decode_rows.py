"""Places of decode rows' tokens, and Triton's against their definition."""

import pytest
import torch

from kernels.decode_rows import place_tokens, reference
from kernels.rope import frequencies, rotation_table

triton = pytest.importorskip("kernels.decode_rows.triton")
PAIRS, BLOCKS, POSITIONS = 12, 4, 256
ROTATIONS = rotation_table(frequencies(2 * PAIRS, 10000.0), POSITIONS)


def draw_rows(rows: int, count: int) -> tuple[torch.Tensor, ...]:
    """Their tokens lie in a wider tensor, and their blocks in a wider table."""
    token_ids = torch.randint(-1, 500, (rows, count + 2))[:, 1 : 1 + count]
    starts = torch.randint(POSITIONS - count, (rows,), dtype=torch.int32)
    table = torch.randint(90, (rows, BLOCKS + 3), dtype=torch.int32)[:, :BLOCKS]
    return token_ids, starts, table, torch.rand(rows) < 0.7


def test_a_token_stands_behind_the_one_before_it_and_in_the_block_of_its_position() -> None:
    table = torch.tensor([[7, 3], [5, 9]], dtype=torch.int32)
    token_ids, starts = torch.tensor([[11, -1], [13, 14]]), torch.tensor([63, 2], dtype=torch.int32)
    placed = place_tokens(token_ids, starts, table, torch.tensor([True, False]), ROTATIONS)
    assert placed.token_ids.tolist() == [11, 0, 13, 14]
    assert placed.slots.tolist() == [7 * 64 + 63, 3 * 64, 5 * 64 + 2, 5 * 64 + 3]
    assert placed.real.tolist() == [True, True, False, False]
    assert placed.lengths.tolist() == [65, 4]
    assert torch.equal(placed.rotations, ROTATIONS[[63, 64, 2, 3]])


@pytest.mark.parametrize(("rows", "count"), [(0, 2), (1, 1), (5, 1), (7, 4)])
def test_tokens_are_placed_as_defined(device: torch.device, rows: int, count: int) -> None:
    given = [each.to(device) for each in (*draw_rows(rows, count), ROTATIONS)]
    found, expected = (place(*given) for place in (triton.place_tokens, reference.place_tokens))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)
        # Kernels read it as it lies.
        assert one.is_contiguous()
