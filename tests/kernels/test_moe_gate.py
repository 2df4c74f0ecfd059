import math
from dataclasses import replace

import pytest
import torch

from kernels.moe_gate import NO_EXPERT, Routing, moe_gate


def chosen_by_hand(logits: list[float], bias: list[float], k: int, groups: int, allowed: int) -> set[int]:
    """The experts of one token, step by step as in the paper."""
    scores = [1 / (1 + math.exp(-logit)) + own for logit, own in zip(logits, bias, strict=True)]
    size = len(scores) // groups
    totals = [sum(sorted(scores[group * size : (group + 1) * size])[-2:]) for group in range(groups)]
    best_groups = sorted(range(groups), key=lambda group: totals[group])[-allowed:]
    eligible = [expert for expert in range(len(scores)) if expert // size in best_groups]
    return set(sorted(eligible, key=lambda expert: scores[expert])[-k:])


@pytest.mark.parametrize(("groups", "allowed"), [(1, 1), (4, 2), (4, 4), (8, 3), (16, 6)])
def test_experts_come_from_the_best_groups(groups: int, allowed: int) -> None:
    logits, bias = torch.randn(40, 16) * 2, torch.randn(16) * 0.3
    _, experts = moe_gate(logits, bias, Routing(3, groups, allowed, normalize=True, scaling=1.0, shared=0))
    for row, found in zip(logits.tolist(), experts.tolist(), strict=True):
        assert set(found) == chosen_by_hand(row, bias.tolist(), 3, groups, allowed)


@pytest.mark.parametrize("normalize", [True, False])
def test_weights_are_affinities_without_the_bias(normalize: bool) -> None:
    logits, bias = torch.randn(20, 8), torch.randn(8)
    weights, experts = moe_gate(logits, bias, Routing(2, 1, 1, normalize=normalize, scaling=2.5, shared=0))
    expected = logits.sigmoid().gather(1, experts)
    if normalize:
        expected = expected / expected.sum(1, keepdim=True)
    assert torch.allclose(weights, expected * 2.5)


def test_softmax_weights_are_shares_of_all_experts() -> None:
    logits = torch.randn(20, 8)
    routing = Routing(2, 1, 1, normalize=False, scaling=4.0, shared=0, softmax=True)
    weights, experts = moe_gate(logits, torch.zeros(8), routing)
    assert torch.equal(experts.sort().values, logits.topk(2).indices.sort().values)
    assert torch.allclose(weights, logits.softmax(1).gather(1, experts) * 4)


def test_softmax_groups_compete_by_their_best_expert() -> None:
    # Group 1 has the larger sum of two, group 0 the best expert.
    logits = torch.tensor([[3.0, -9.0, 2.5, 2.5]])
    routing = Routing(1, groups=2, groups_per_token=1, normalize=False, scaling=1.0, shared=0, softmax=True)
    assert moe_gate(logits, torch.zeros(4), routing)[1].tolist() == [[0]]


def test_the_bias_alone_can_decide() -> None:
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0])
    weights, experts = moe_gate(torch.zeros(1, 4), bias, Routing(1, 1, 1, normalize=False, scaling=1.0, shared=0))
    assert experts.tolist() == [[2]] and weights.tolist() == [[0.5]]


@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize("normalize", [True, False])
def test_shared_experts_come_last_with_a_weight_of_one(shared: int, normalize: bool) -> None:
    routing = Routing(2, groups=2, groups_per_token=1, normalize=normalize, scaling=2.5, shared=shared)
    logits, bias = torch.randn(9, 8), torch.randn(8)
    logits[3] = float("nan")
    weights, experts = moe_gate(logits, bias, routing)
    routed_weights, routed = moe_gate(logits, bias, replace(routing, shared=0))
    assert torch.equal(experts[:, :2], routed)
    assert torch.equal(weights[:, :2].nan_to_num(), routed_weights.nan_to_num())
    assert experts[:, 2:].tolist() == [list(range(8, 8 + shared))] * 9
    assert weights[:, 2:].tolist() == [[1.0] * shared] * 9


@pytest.mark.parametrize("shared", [0, 1])
def test_no_tokens_choose_nothing(shared: int) -> None:
    routing = Routing(2, groups=4, groups_per_token=2, normalize=True, scaling=1.0, shared=shared)
    weights, experts = moe_gate(torch.empty(0, 8), torch.zeros(8), routing)
    assert weights.shape == experts.shape == (0, 2 + shared)


def test_nan_is_chosen_last_and_choices_stay_distinct() -> None:
    logits = torch.randn(3, 16)
    logits[0] = float("nan")
    logits[1, ::2] = float("nan")
    routing = Routing(6, groups=4, groups_per_token=3, normalize=True, scaling=1.0, shared=0)
    _, experts = moe_gate(logits, torch.zeros(16), routing)
    assert all(len(set(row)) == 6 and set(row) <= set(range(16)) for row in experts.tolist())
    assert all(expert % 2 for expert in experts[1].tolist())
    assert torch.equal(moe_gate(logits[2:], torch.zeros(16), routing)[1], experts[2:])


def test_tokens_that_do_not_count_choose_no_expert() -> None:
    routing = Routing(2, groups=4, groups_per_token=2, normalize=True, scaling=1.0, shared=1)
    logits, bias, counted = torch.randn(5, 8), torch.randn(8), torch.tensor([True, False, True, True, False])
    _, all_chosen = moe_gate(logits, bias, routing)
    _, experts = moe_gate(logits, bias, routing, counted)
    assert torch.equal(experts[counted], all_chosen[counted])
    assert experts[~counted].tolist() == [[NO_EXPERT] * 3] * 2
