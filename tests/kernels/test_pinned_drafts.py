"""Drafts that count as right as often as a measurement says."""

import pytest
import torch

from kernels.decode_rows import NO_TOKEN
from kernels.draft_check.pinned import STEPS, PinnedAcceptance

SHARES = (0.85, 0.72, 0.61)


def pinned(shares: tuple[float, ...], rows: int) -> PinnedAcceptance:
    return PinnedAcceptance(shares, 3, rows, torch.device("cpu"))


def counted_in(acceptance: PinnedAcceptance, rows: int, drafts: int, steps: int) -> torch.Tensor:
    none, guessed = torch.zeros(rows, dtype=torch.int64), torch.ones(rows, drafts, dtype=torch.int64)
    return torch.stack([acceptance.count(none, guessed) for _ in range(steps)])


@pytest.mark.parametrize("rows", [1, 8])
def test_shares_are_met_within_thirty_steps(rows: int) -> None:
    acceptance = pinned(SHARES, rows)
    for steps in (30, STEPS):
        found = counted_in(acceptance, rows, 3, steps)
        for place, share in enumerate(SHARES):
            assert (found > place).double().mean().item() == pytest.approx(share, abs=0.06)


def test_no_more_drafts_are_right_than_there_are() -> None:
    acceptance = pinned((0.0,), 4)
    assert counted_in(acceptance, 4, 3, 9).eq(0).all()
    acceptance.set((1.0, 1.0))
    assert counted_in(acceptance, 4, 3, 9).eq(2).all() and counted_in(acceptance, 4, 1, 9).eq(1).all()
    lacking = torch.tensor([[5, NO_TOKEN], [NO_TOKEN, NO_TOKEN]])
    assert acceptance.count(torch.zeros(2, dtype=torch.int64), lacking).tolist() == [1, 0]


def test_drafts_that_are_right_stay_right() -> None:
    acceptance = pinned((0.0,), 2)
    assert acceptance.count(torch.tensor([2, 0]), torch.ones(2, 3, dtype=torch.int64)).tolist() == [2, 0]
