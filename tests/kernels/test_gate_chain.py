"""The gate's kernels in a chain whose kernels start before the previous one has ended."""

import pytest
import torch

from bench.kernels.deepseek_r1 import EXPERTS, ROUTING
from kernels.linear import multiply_in_shares
from kernels.moe_gate import moe_gate
from kernels.norm import add_rms_norm
from tests.support.hopper import on_hopper
from tests.support.replays import Step, assert_replays_are_exact

HIDDEN, LAYERS, REPLAYS = 1024, 6, 100


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tokens", [1, 32, 64, 90, 150])
def test_a_captured_gate_computes_what_its_kernels_do(tokens: int) -> None:
    norms = torch.rand(LAYERS, HIDDEN, device="cuda").bfloat16()
    weights = torch.randn(LAYERS, EXPERTS, HIDDEN, device="cuda").bfloat16() / HIDDEN**0.5
    bias = torch.randn(EXPERTS, device="cuda") / 10

    def chain(delta: torch.Tensor, after_each: Step) -> torch.Tensor:
        residual = torch.zeros_like(delta)
        found: list[torch.Tensor] = []
        for norm, weight in zip(norms, weights, strict=True):
            hidden = add_rms_norm(delta, residual, norm, 1e-6)
            after_each()
            logits = multiply_in_shares(hidden, weight)
            after_each()
            chosen = moe_gate(logits, bias, ROUTING)
            after_each()
            delta = hidden
            found += chosen
        return torch.stack([each.double() for each in found])

    assert_replays_are_exact(chain, (tokens, HIDDEN), REPLAYS)
