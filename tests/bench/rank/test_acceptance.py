"""Drafts that are right as often as a bench says."""

import pytest
import torch

from bench.rank.acceptance import STEPS, InjectedAcceptance
from engine.drafts import draft_pass
from engine.drafts import graph as draft_graph
from kernels.decode_rows import NO_TOKEN
from kernels.draft_check import count_accepted

SHARES = (0.85, 0.72, 0.61)


def accepted_in(acceptance: InjectedAcceptance, rows: int, drafts: int, steps: int) -> torch.Tensor:
    drawn, guessed = torch.zeros(rows, 1 + drafts, dtype=torch.int64), torch.ones(rows, drafts, dtype=torch.int64)
    return torch.stack([acceptance.count_accepted(drawn, guessed) for _ in range(steps)])


@pytest.mark.parametrize("rows", [1, 8])
def test_shares_are_met_within_thirty_steps(rows: int) -> None:
    acceptance = InjectedAcceptance(3, rows, torch.device("cpu"))
    acceptance.set(SHARES)
    for steps in (30, STEPS):
        found = accepted_in(acceptance, rows, 3, steps)
        for place, share in enumerate(SHARES):
            assert (found > place).double().mean().item() == pytest.approx(share, abs=0.06)


def test_no_more_drafts_are_right_than_there_are() -> None:
    acceptance = InjectedAcceptance(3, 4, torch.device("cpu"))
    assert accepted_in(acceptance, 4, 3, 9).eq(0).all()
    acceptance.set((1.0, 1.0))
    assert accepted_in(acceptance, 4, 3, 9).eq(2).all() and accepted_in(acceptance, 4, 1, 9).eq(1).all()
    lacking = torch.tensor([[5, NO_TOKEN], [NO_TOKEN, NO_TOKEN]])
    assert acceptance.count_accepted(torch.zeros(2, 3, dtype=torch.int64), lacking).tolist() == [1, 0]


def test_it_replaces_what_the_engine_counts() -> None:
    acceptance = InjectedAcceptance(1, 1, torch.device("cpu"))
    with acceptance.injected():
        assert [vars(each)["count_accepted"] for each in (draft_graph, draft_pass)] == [acceptance.count_accepted] * 2
    assert all(vars(each)["count_accepted"] is count_accepted for each in (draft_graph, draft_pass))
