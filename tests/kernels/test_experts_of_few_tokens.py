"""Experts that find a few tokens by their choices, against their definition; without a GPU in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.act_quant import dequantize, quantize
from kernels.fp8_gemm.operands import BLOCK, BlockScaled, block_scaled
from kernels.fp8_gemm.reference import dequantize_weight
from kernels.grouped_gemm import CHOICE_COUNTERS
from kernels.moe_gate.reference import NO_EXPERT
from kernels.moe_permute import NOWHERE
from kernels.swiglu.reference import swiglu
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

few_tokens = pytest.importorskip("kernels.grouped_gemm.few_tokens")

pytestmark = pytest.mark.usefixtures("poisoned")


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16() / shape[-1] ** 0.5


def quantized_weight(weight: torch.Tensor) -> tuple[BlockScaled, torch.Tensor]:
    """The weight in blocks of FP8, and what it stands for."""
    values = (weight.float() * 64).to(torch.float8_e4m3fn)
    blocks = len(weight), -(-weight.shape[1] // BLOCK), weight.shape[2] // BLOCK
    made = block_scaled(values, torch.rand(blocks, device=weight.device) + 0.5)
    return made, dequantize_weight(made)


def assert_as_defined(
    choices: torch.Tensor,
    experts: int,
    hidden: int,
    width: int,
    first: int,
    shared: int,
    feed_forward: Callable[..., tuple[torch.Tensor, torch.Tensor]] = few_tokens.feed_forward,
    *,
    fp8: bool = False,
) -> None:
    device = choices.device
    x, gate_up = random(len(choices), hidden, device=device) * 8, random(experts, 2 * width, hidden, device=device)
    down = random(experts, hidden, width, device=device)
    if fp8:
        quantized, (scaled, gate_up), (scaled_down, down) = quantize(x), *map(quantized_weight, (gate_up, down))
        x = dequantize(quantized)
        rows, positions = feed_forward(quantized, choices, scaled, scaled_down, first, shared)
    else:
        rows, positions = feed_forward(x, choices, gate_up, down, first, shared)
    for token, own in enumerate(choices.tolist()):
        for place, choice in enumerate(own):
            position = int(positions[token, place])
            if not 0 <= choice - first < experts:
                assert position == NOWHERE
                continue
            inner = swiglu((gate_up[choice - first].float() @ x[token].float()).unsqueeze(0)).bfloat16()
            assert relative_error(rows[position], down[choice - first].float() @ inner[0].float()) < 0.01


def chosen(tokens: int, routed: int, places: int, shared: int, device: torch.device) -> torch.Tensor:
    choices = torch.rand(tokens, routed).argsort(dim=1)[:, : places - shared]
    return torch.cat([choices, torch.arange(routed, routed + shared).expand(tokens, -1)], dim=1).to(device)


# Widths that do not fill a program's tile; few experts, so that tokens choose the same ones.
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shared", [0, 2])
def test_tokens_get_what_their_experts_make_of_them(tokens: int, shared: int, device: torch.device) -> None:
    assert_as_defined(chosen(tokens, 5, 4, shared, device), 5 + shared, 96, 40, 0, shared)


@pytest.mark.parametrize(("tokens", "shared"), [(1, 2), (2, 0)])
def test_experts_in_blocks_of_fp8_make_the_same(tokens: int, shared: int, device: torch.device) -> None:
    assert_as_defined(chosen(tokens, 2, 2 + shared, shared, device), 2 + shared, 256, 384, 0, shared, fp8=True)


def test_experts_of_other_ranks_and_of_padding_make_nothing(device: torch.device) -> None:
    choices = torch.tensor([[9, 3, 4], [NO_EXPERT] * 3, [4, 0, 10]], device=device)
    assert_as_defined(choices, 3, 64, 24, 3, 0)


def test_shared_experts_leave_padding_out(device: torch.device) -> None:
    choices = chosen(3, 4, 4, 2, device)
    choices[1] = NO_EXPERT
    assert_as_defined(choices, 6, 64, 24, 0, 2)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tokens", [1, 2, 4])
# Moonlight's and GLM-4.7-Flash's experts.
@pytest.mark.parametrize(("places", "shared", "width"), [(8, 2, 1408), (5, 1, 1536)])
@pytest.mark.parametrize("fp8", [False, True])
def test_published_experts_of_few_tokens(tokens: int, places: int, shared: int, width: int, fp8: bool) -> None:
    choices = chosen(tokens, 64, places, shared, torch.device("cuda"))
    assert_as_defined(choices, 64 + shared, 2048, width, 0, shared, fp8=fp8)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("places", "shared", "width"), [(8, 2, 1408), (5, 1, 1536), (6, 0, 2048)])
@pytest.mark.parametrize("fp8", [False, True])
def test_one_tokens_published_experts(places: int, shared: int, width: int, fp8: bool) -> None:
    from kernels.grouped_gemm import one_token

    progress = torch.zeros(CHOICE_COUNTERS, dtype=torch.int32, device="cuda")

    def feed_forward(
        x: Any, choices: torch.Tensor, gate_up: Any, down: Any, first: int, shared: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return one_token.feed_forward(x, choices, gate_up, down, progress, first, shared)

    for _ in range(20):
        choices = chosen(1, 64, places, shared, torch.device("cuda"))
        assert_as_defined(choices, 64 + shared, 2048, width, 0, shared, feed_forward, fp8=fp8)
    assert not progress.any()
