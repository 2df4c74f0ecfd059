"""The choice among DeepSeek-R1's and V2's experts, on Hopper, against its definition."""

from dataclasses import replace

import pytest
import torch

from bench.kernels.deepseek_r1 import ROUTING
from kernels.moe_gate import NO_EXPERT, Routing, choice, reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper
from tests.support.softmax_gates import SOFTMAX_GATES

EXPERTS, GROUPS, CHOICES = 256, 8, 8
PUBLISHED = replace(ROUTING, shared=0)
pytestmark = [
    pytest.mark.gpu,
    on_hopper,
    pytest.mark.usefixtures("poisoned"),
]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize("shares", [1, 5, 14, choice.MOST_SHARES])
@pytest.mark.parametrize("tokens", [0, 1, 96, choice.MOST_TOKENS])
@pytest.mark.parametrize(("allowed", "normalize", "shared"), [(4, True, 0), (4, True, 1), (1, False, 2), (8, True, 24)])
def test_experts_and_weights_are_the_definitions(
    tokens: int, shares: int, allowed: int, normalize: bool, shared: int
) -> None:
    assert_as_defined(random(shares, tokens, EXPERTS), Routing(CHOICES, GROUPS, allowed, normalize, 2.5, shared))


@pytest.mark.parametrize("shares", [1, 5, choice.MOST_SHARES])
@pytest.mark.parametrize("tokens", [0, 1, 96, choice.MOST_TOKENS])
@pytest.mark.parametrize(("experts", "routing"), SOFTMAX_GATES)
def test_softmax_gates_choose_as_defined(experts: int, routing: Routing, tokens: int, shares: int) -> None:
    assert_as_defined(random(shares, tokens, experts) * 3, routing)


def assert_as_defined(logits: torch.Tensor, routing: Routing) -> None:
    tokens, experts, choices = logits.shape[1], logits.shape[2], routing.experts_per_token
    bias = torch.zeros(experts, device="cuda") if routing.softmax else random(experts) / 10
    assert choice.takes(logits, routing)
    weights, chosen = choice.moe_gate(logits, bias, routing)
    expected_weights, expected = reference.moe_gate(logits.sum(0), bias, routing)
    # Shared experts follow the chosen ones and have a weight of 1.
    assert torch.equal(chosen[:, choices:], expected[:, choices:]) and weights[:, choices:].eq(1).all()
    order, expected_order = chosen.argsort(dim=1), expected.argsort(dim=1)
    # Two choices may be so close that sums in another order swap them.
    same = (chosen.gather(1, order) == expected.gather(1, expected_order)).all(dim=1)
    assert (~same).sum() <= tokens // 90
    found = weights.gather(1, order)[same]
    assert relative_error(found, expected_weights.gather(1, expected_order)[same]) < (1e-5 if routing.softmax else 1e-6)


def test_tokens_that_do_not_count_choose_no_expert() -> None:
    logits, bias, counted = random(5, 7, EXPERTS), random(EXPERTS), torch.arange(7, device="cuda") % 3 > 0
    weights, chosen = choice.moe_gate(logits, bias, PUBLISHED)
    same_weights, counted_alone = choice.moe_gate(logits, bias, PUBLISHED, counted)
    assert torch.equal(counted_alone, chosen.masked_fill(~counted.unsqueeze(1), NO_EXPERT))
    assert torch.equal(same_weights, weights)


def test_equal_experts_are_chosen_once_and_from_the_best_groups() -> None:
    logits, bias = torch.zeros(1, 3, EXPERTS, device="cuda"), torch.zeros(EXPERTS, device="cuda")
    logits[0, 1, 64:192] = 1.0
    logits[0, 2] = torch.arange(EXPERTS, device="cuda") % 3
    _, chosen = choice.moe_gate(logits, bias, PUBLISHED)
    assert all(len(set(row)) == CHOICES and set(row) <= set(range(EXPERTS)) for row in chosen.tolist())
    assert set(chosen[1].tolist()) <= set(range(64, 192))
    assert all(expert % 3 == 2 for expert in chosen[2].tolist())


@pytest.mark.parametrize(("experts", "routing"), SOFTMAX_GATES)
def test_a_softmax_of_nan_still_chooses_distinct_experts(experts: int, routing: Routing) -> None:
    logits = random(2, experts)
    logits[0, 3] = float("nan")
    _, chosen = choice.moe_gate(logits.unsqueeze(0), torch.zeros(experts, device="cuda"), routing)
    routed = chosen[:, : routing.experts_per_token].tolist()
    assert all(len(set(row)) == len(row) and set(row) <= set(range(experts)) for row in routed)


def test_nan_is_chosen_last() -> None:
    logits = random(3, EXPERTS)
    logits[0], logits[1, 5:] = float("nan"), float("nan")
    _, chosen = choice.moe_gate(logits.unsqueeze(0), torch.zeros(EXPERTS, device="cuda"), PUBLISHED)
    assert all(len(set(row)) == CHOICES and set(row) <= set(range(EXPERTS)) for row in chosen.tolist())
    assert set(range(5)) <= set(chosen[1].tolist())


def test_other_numbers_of_experts_and_shares_are_not_taken() -> None:
    logits = random(1, 4, EXPERTS)
    assert choice.takes(logits, PUBLISHED)
    assert not choice.takes(logits, replace(PUBLISHED, experts_per_token=CHOICES - 2))
    assert not choice.takes(logits, replace(PUBLISHED, groups=GROUPS // 2))
    assert not choice.takes(logits, replace(PUBLISHED, softmax=True))
    assert not choice.takes(random(1, 4, 128), PUBLISHED)
    assert not choice.takes(random(choice.MOST_SHARES + 1, 4, EXPERTS), PUBLISHED)
    assert not choice.takes(logits, replace(PUBLISHED, shared=choice.MOST_PLACES))
    assert not choice.takes(random(1, choice.MOST_TOKENS + 1, EXPERTS), PUBLISHED)
