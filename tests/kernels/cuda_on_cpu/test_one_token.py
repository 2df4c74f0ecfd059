"""Both products of one token's experts, on the CPU."""

import pytest
import torch

from kernels.grouped_gemm import CHOICE_COUNTERS
from kernels.moe_gate.reference import NO_EXPERT
from kernels.moe_permute import NOWHERE
from kernels.swiglu.reference import swiglu
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error


# Experts of this rank and of others, shared ones, padding; widths of less than a chunk, and of several.
@pytest.mark.parametrize(
    ("choices", "first", "shared", "hidden", "width"),
    [([3, 0, 5, 6], 0, 2, 264, 40), ([9, 4, 3], 3, 0, 512, 776), ([NO_EXPERT] * 3, 0, 1, 64, 32)],
    ids=str,
)
def test_one_tokens_experts_compute_as_defined(
    choices: list[int], first: int, shared: int, hidden: int, width: int, on_cpu: CudaOnCpu
) -> None:
    ours, experts = on_cpu.module("grouped_gemm.one_token"), 7 if shared else 4
    x, gate_up = torch.randn(1, hidden).bfloat16(), torch.randn(experts, 2 * width, hidden).bfloat16() / hidden**0.5
    down, progress = torch.randn(experts, hidden, width).bfloat16(), torch.zeros(CHOICE_COUNTERS, dtype=torch.int32)
    # All CTAs run at once, and here one after another.
    rows, positions = ours.feed_forward(x, torch.tensor([choices]), gate_up, down, progress, first, shared, ctas=1)
    for place, choice in enumerate(choices):
        expert = choice - first
        assert int(positions[0, place]) == (place if 0 <= expert < experts else NOWHERE)
        if 0 <= expert < experts:
            inner = swiglu((gate_up[expert].float() @ x[0].float()).unsqueeze(0)).bfloat16().float()
            assert relative_error(rows[place], down[expert].float() @ inner[0]) < 0.01
    assert not progress.any()
