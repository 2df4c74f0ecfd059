"""Both products of one token's experts, on the CPU."""

from typing import Any

import pytest
import torch

from kernels.act_quant import dequantize, quantize
from kernels.fp8_gemm.operands import BlockScaled, block_scaled
from kernels.fp8_gemm.reference import dequantize_weight
from kernels.grouped_gemm import CHOICE_COUNTERS
from kernels.moe_gate.reference import NO_EXPERT
from kernels.moe_permute import NOWHERE
from kernels.swiglu.reference import swiglu
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16() / shape[-1] ** 0.5


def in_blocks(weight: torch.Tensor) -> BlockScaled:
    experts, outputs, inputs = weight.shape
    return block_scaled((weight * 64).to(torch.float8_e4m3fn), torch.rand(experts, outputs // 128, inputs // 128) + 0.5)


# Experts of this rank and of others, shared ones, padding; widths of less than a chunk, and of several.
@pytest.mark.parametrize(
    ("choices", "first", "shared", "hidden", "width"),
    [([3, 0, 5, 6], 0, 2, 272, 48), ([9, 4, 3], 3, 0, 512, 784), ([NO_EXPERT] * 3, 0, 1, 64, 32)],
    ids=str,
)
def test_one_tokens_experts_compute_as_defined(
    choices: list[int], first: int, shared: int, hidden: int, width: int, on_cpu: CudaOnCpu
) -> None:
    experts = 7 if shared else 4
    gate_up, down = weights(experts, 2 * width, hidden), weights(experts, hidden, width)
    assert_computed(on_cpu, choices, first, shared, (torch.randn(1, hidden).bfloat16(), gate_up, down))


@pytest.mark.parametrize(("hidden", "width"), [(256, 128), (640, 768)])
def test_one_tokens_experts_in_fp8_compute_as_defined(hidden: int, width: int, on_cpu: CudaOnCpu) -> None:
    gate_up, down = in_blocks(weights(4, 2 * width, hidden)), in_blocks(weights(4, hidden, width))
    assert_computed(on_cpu, [1, 0, 3], 0, 1, (quantize(torch.randn(1, hidden).bfloat16()), gate_up, down))


def assert_computed(on_cpu: CudaOnCpu, choices: list[int], first: int, shared: int, given: tuple[Any, ...]) -> None:
    """given: token, gate and up, down."""
    x, gate_up, down = given
    progress = torch.zeros(CHOICE_COUNTERS, dtype=torch.int32)
    # All CTAs run at once, and here one after another.
    ours, chosen = on_cpu.module("grouped_gemm.one_token"), torch.tensor([choices])
    rows, positions = ours.feed_forward(x, chosen, gate_up, down, progress, first, shared, ctas=1)
    if not isinstance(x, torch.Tensor):
        x, gate_up, down = dequantize(x), dequantize_weight(gate_up), dequantize_weight(down)
    for place, choice in enumerate(choices):
        expert = choice - first
        assert int(positions[0, place]) == (place if 0 <= expert < len(down) else NOWHERE)
        if 0 <= expert < len(down):
            inner = swiglu((gate_up[expert].float() @ x[0].float()).unsqueeze(0)).bfloat16().float()
            assert relative_error(rows[place], down[expert].float() @ inner[0]) < 0.01
    assert not progress.any()
