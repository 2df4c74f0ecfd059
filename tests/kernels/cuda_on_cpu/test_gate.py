"""The norm and the gate of few tokens, with the rows of experts, on the CPU."""

import pytest
import torch

from kernels.moe_gate import Routing, reference
from kernels.norm import reference as norms
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error
from tests.support.listed_rows import assert_same_lists, list_rows

MOONLIGHT = Routing(6, 1, 1, normalize=True, scaling=2.446, shared=2)
GLM = Routing(4, 1, 1, normalize=True, scaling=1.8, shared=1)
V2_LITE = Routing(6, 1, 1, normalize=False, scaling=1.0, shared=2, softmax=True)
ALONE = Routing(8, 1, 1, normalize=True, scaling=2.5, shared=0)


@pytest.mark.parametrize(
    ("tokens", "experts", "routing", "padding"),
    [(2, 64, GLM, 0), (16, 64, MOONLIGHT, 3), (23, 64, V2_LITE, 20), (32, 128, ALONE, 0), (5, 64, GLM, 5)],
)
def test_tokens_are_listed_by_the_experts_that_they_choose(
    tokens: int, experts: int, routing: Routing, padding: int, on_cpu: CudaOnCpu
) -> None:
    placed = on_cpu.module("moe_gate.placed")
    delta, residual = torch.randn(tokens, 704).bfloat16()[:, :640], torch.randn(tokens, 640).bfloat16() * 3
    norm, weight, added = torch.randn(640).bfloat16(), torch.randn(experts, 640).bfloat16() / 25, residual.clone()
    hidden = torch.empty_like(residual)
    norms.add_rms_norm(delta, added, norm, 1e-6, hidden, None)
    bias = torch.zeros(experts) if routing.softmax else torch.randn(experts) / 10
    counted = torch.arange(tokens) < tokens - padding if padding else None
    found, weights, chosen, listed = placed.choose(delta, residual, norm, 1e-6, weight, bias, routing, counted)
    assert torch.equal(residual, added) and relative_error(found, hidden) < 1e-3
    expected_weights, expected = reference.moe_gate(found.float() @ weight.float().t(), bias, routing, counted)
    order, expected_order = chosen.argsort(dim=1), expected.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
    known = tokens - padding
    ordered = weights.gather(1, order)[:known]
    assert not known or relative_error(ordered, expected_weights.gather(1, expected_order)[:known]) < 1e-3
    assert_same_lists(listed, list_rows(chosen, experts + routing.shared, routing.shared))


def test_each_token_may_have_a_bias_of_its_own(on_cpu: CudaOnCpu) -> None:
    placed = on_cpu.module("moe_gate.placed")
    # So narrow that some CTAs have nothing to multiply.
    delta, residual, weight = torch.randn(9, 192).bfloat16(), torch.randn(9, 192).bfloat16(), torch.zeros(64, 192)
    bias, norm = torch.randn(9, 64), torch.ones(192).bfloat16()
    chosen = placed.choose(delta, residual, norm, 1e-6, weight.bfloat16(), bias, ALONE, None).experts
    assert torch.equal(chosen.sort(dim=1).values, bias.topk(ALONE.experts_per_token, dim=1).indices.sort(dim=1).values)
