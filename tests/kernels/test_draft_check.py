"""Checks of drafts, and Triton's kernels against their definition."""

import pytest
import torch

from kernels.draft_check import count_accepted, reference, settle

triton = pytest.importorskip("kernels.draft_check.triton")


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    drawn = torch.tensor([[5, 6, 7, 8], [1, 9, 9, 9], [2, 9, 3, 4]])
    drafts = torch.tensor([[5, 6, 9], [-1, -1, -1], [2, 7, 3]])
    assert count_accepted(drawn, drafts).tolist() == [2, 0, 1]
    assert count_accepted(drawn[:, :1], drafts[:, :0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("rows", "count"), [(0, 2), (4, 0), (1, 1), (40, 3)])
def test_drafts_are_counted_as_defined(device: torch.device, rows: int, count: int) -> None:
    # Among few different tokens many are right; a grid of draws may be wider.
    drawn = torch.randint(2, (rows, count + 3), device=device)[:, : count + 1]
    drafts = torch.randint(-1, 2, (rows, count + 1), device=device)[:, 1:]
    found, expected = (each.count_accepted(drawn, drafts) for each in (triton, reference))
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_a_line_ends_after_its_accepted_drafts() -> None:
    last_drawn, missing = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    drawn, starts = torch.tensor([[5, 6, 7], [8, 9, -1]]), torch.tensor([100, 30], dtype=torch.int32)
    drafts, rows = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([2, 0])
    accepted = torch.tensor([0, 1])
    last, positions = settle(accepted, drawn, torch.tensor([0, 3]), starts, drafts, rows, last_drawn, missing)
    assert last.tolist() == [0, 4] and positions.tolist() == [100, 31]
    assert last_drawn.tolist() == [9, 0, 5] and missing.tolist() == [0, 0, 2]


@pytest.mark.parametrize(("lines", "count"), [(0, 2), (3, 0), (1, 1), (30, 3)])
@pytest.mark.parametrize("own_rows", [True, False])
def test_lines_are_settled_as_defined(device: torch.device, lines: int, count: int, own_rows: bool) -> None:
    accepted = torch.randint(count + 1, (lines,), device=device)
    drawn = torch.randint(99, (lines, count + 1), device=device)
    first = torch.randint(999, (lines,), device=device)
    starts, drafts = (torch.randint(999, (lines,), dtype=torch.int32, device=device) for _ in range(2))
    rows = None if own_rows else torch.randperm(lines + 2, device=device)[:lines]
    written = [torch.full((lines + 2,), -5, dtype=each, device=device) for each in (torch.int64, torch.int32)]
    other = [each.clone() for each in written]
    found = triton.settle(accepted, drawn, first, starts, drafts, rows, written[0], written[1])
    expected = reference.settle(accepted, drawn, first, starts, drafts, rows, other[0], other[1])
    for made, definition in zip((*found, *written), (*expected, *other), strict=True):
        assert made.dtype == definition.dtype and torch.equal(made, definition)
