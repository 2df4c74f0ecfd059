"""Experts that find a few tokens by their choices, against their definition; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.act_quant import Quantized, dequantize, quantize
from kernels.fp8_gemm import BlockScaled, block_scaled
from kernels.moe_gate.reference import NO_EXPERT
from kernels.moe_permute import NOWHERE
from kernels.swiglu.reference import swiglu
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

few_tokens = pytest.importorskip("kernels.grouped_gemm.few_tokens")

pytestmark = pytest.mark.usefixtures("poisoned")

FORMATS = pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp8"])


def random(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16() / shape[-1] ** 0.5


def random_weight(*shape: int, scaled: bool, device: torch.device) -> torch.Tensor | BlockScaled:
    if not scaled:
        return random(*shape, device=device)
    values = torch.randn(shape, device=device).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(shape[0], shape[1] // 128, shape[2] // 128, device=device) + 0.1
    return block_scaled(values, scales / 50 / shape[2] ** 0.5)


def plain(given: torch.Tensor | Quantized | BlockScaled) -> torch.Tensor:
    if isinstance(given, BlockScaled):
        return given.values.float() * given.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return dequantize(given) if isinstance(given, Quantized) else given.float()


def assert_as_defined(
    choices: torch.Tensor, experts: int, hidden: int, width: int, first: int, shared: int, *, scaled: bool = False
) -> None:
    device = choices.device
    gate_up = random_weight(experts, 2 * width, hidden, scaled=scaled, device=device)
    down = random_weight(experts, hidden, width, scaled=scaled, device=device)
    x = random(len(choices), hidden, device=device) * 8
    given = quantize(x) if scaled else x
    rows, positions = few_tokens.feed_forward(given, choices, gate_up, down, first, shared)
    plain_x, plain_gate_up, plain_down = plain(given), plain(gate_up), plain(down)
    for token, own in enumerate(choices.tolist()):
        for place, choice in enumerate(own):
            position = int(positions[token, place])
            if not 0 <= choice - first < experts:
                assert position == NOWHERE
                continue
            inner = swiglu((plain_gate_up[choice - first] @ plain_x[token]).unsqueeze(0)).bfloat16()
            assert relative_error(rows[position], plain_down[choice - first] @ inner[0].float()) < 0.01


def chosen(tokens: int, routed: int, places: int, shared: int, device: torch.device) -> torch.Tensor:
    choices = torch.rand(tokens, routed).argsort(dim=1)[:, : places - shared]
    return torch.cat([choices, torch.arange(routed, routed + shared).expand(tokens, -1)], dim=1).to(device)


# Widths that do not fill a program's tile; few experts, so that tokens choose the same ones.
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shared", [0, 2])
def test_tokens_get_what_their_experts_make_of_them(tokens: int, shared: int, device: torch.device) -> None:
    assert_as_defined(chosen(tokens, 5, 4, shared, device), 5 + shared, 96, 40, 0, shared)


@pytest.mark.parametrize("tokens", [1, 3])
def test_scaled_experts_multiply_quantized_tokens(tokens: int, device: torch.device) -> None:
    assert_as_defined(chosen(tokens, 5, 4, 2, device), 7, 256, 384, 0, 2, scaled=True)


def test_experts_of_other_ranks_and_of_padding_make_nothing(device: torch.device) -> None:
    choices = torch.tensor([[9, 3, 4], [NO_EXPERT] * 3, [4, 0, 10]], device=device)
    assert_as_defined(choices, 3, 64, 24, 3, 0)


def test_shared_experts_leave_padding_out(device: torch.device) -> None:
    choices = chosen(3, 4, 4, 2, device)
    choices[1] = NO_EXPERT
    assert_as_defined(choices, 6, 64, 24, 0, 2)


@pytest.mark.gpu
@on_hopper
@FORMATS
@pytest.mark.parametrize("tokens", [1, 2, 4])
# Moonlight's and GLM-4.7-Flash's experts.
@pytest.mark.parametrize(("places", "shared", "width"), [(8, 2, 1408), (5, 1, 1536)])
def test_published_experts_of_few_tokens(tokens: int, places: int, shared: int, width: int, scaled: bool) -> None:
    choices = chosen(tokens, 64, places, shared, torch.device("cuda"))
    assert_as_defined(choices, 64 + shared, 2048, width, 0, shared, scaled=scaled)
