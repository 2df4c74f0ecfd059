"""Experts that find one token by its choices, against their definition; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.act_quant import Quantized, dequantize, quantize
from kernels.fp8_gemm import BlockScaled, block_scaled
from kernels.moe_gate.reference import NO_EXPERT
from kernels.moe_permute import NOWHERE
from kernels.swiglu.reference import swiglu
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

one_token = pytest.importorskip("kernels.grouped_gemm.one_token")

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
    rows, positions = one_token.feed_forward(given, choices, gate_up, down, first, shared)
    plain_x, plain_gate_up, plain_down = plain(given)[0], plain(gate_up), plain(down)
    for place, choice in enumerate(choices[0].tolist()):
        if not 0 <= choice - first < experts:
            assert positions[0, place] == NOWHERE
            continue
        inner = swiglu((plain_gate_up[choice - first] @ plain_x).unsqueeze(0)).bfloat16()
        assert relative_error(rows[positions[0, place]], plain_down[choice - first] @ inner[0].float()) < 0.01


def chosen(routed: int, places: int, shared: int, device: torch.device) -> torch.Tensor:
    own = torch.arange(routed, routed + shared)
    return torch.cat([torch.randperm(routed)[: places - shared], own]).unsqueeze(0).to(device)


# Widths that do not fill a program's tile.
@pytest.mark.parametrize("shared", [0, 2])
def test_a_token_gets_what_its_experts_make_of_it(shared: int, device: torch.device) -> None:
    assert_as_defined(chosen(5, 4, shared, device), 5 + shared, 96, 40, 0, shared)


def test_scaled_experts_multiply_a_quantized_token(device: torch.device) -> None:
    assert_as_defined(chosen(5, 4, 2, device), 7, 256, 384, 0, 2, scaled=True)


# The last one is padding.
@pytest.mark.parametrize("choices", [[9, 3, 4], [4, 0, 10], [NO_EXPERT] * 3])
def test_experts_of_other_ranks_make_nothing(choices: list[int], device: torch.device) -> None:
    assert_as_defined(torch.tensor([choices], device=device), 3, 64, 24, 3, 0)


def test_shared_experts_leave_padding_out(device: torch.device) -> None:
    assert_as_defined(torch.full((1, 4), NO_EXPERT, device=device), 6, 64, 24, 0, 2)


@pytest.mark.gpu
@on_hopper
@FORMATS
# Moonlight's and GLM-4.7-Flash's experts.
@pytest.mark.parametrize(("places", "shared", "width"), [(8, 2, 1408), (5, 1, 1536)])
def test_published_experts_of_one_token(places: int, shared: int, width: int, scaled: bool) -> None:
    choices = chosen(64, places, shared, torch.device("cuda"))
    assert_as_defined(choices, 64 + shared, 2048, width, 0, shared, scaled=scaled)
