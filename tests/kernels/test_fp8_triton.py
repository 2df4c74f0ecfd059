"""Triton's FP8 kernels against their definitions: on a GPU at ragged sizes, elsewhere interpreted at small ones."""

import pytest
import torch

from kernels.act_quant import dequantize
from kernels.act_quant import reference as act_quant
from kernels.fp8_gemm import BlockScaled, block_scaled
from kernels.fp8_gemm import reference as fp8_gemm
from kernels.grouped_gemm import reference as grouped_gemm
from kernels.moe_gate import reference as moe_gate
from kernels.moe_permute import Layout, MaskedLayout
from kernels.moe_permute import reference as moe_permute
from kernels.swiglu import reference as swiglu

pytest.importorskip("triton")

from kernels.act_quant import triton as triton_act_quant
from kernels.fp8_gemm import triton as triton_fp8_gemm
from kernels.fp8_gemm.tiles import Tiling
from kernels.grouped_gemm import triton as triton_grouped_gemm
from kernels.moe_gate import triton as triton_moe_gate
from kernels.moe_permute import triton as triton_moe_permute
from kernels.swiglu import triton as triton_swiglu

ON_GPU = torch.cuda.is_available()
# The interpreter does not carry when it rounds to e4m3: what becomes the next power of two, it halves.
QUANTIZED_ERROR = 5e-3 if ON_GPU else 0.3
pytestmark = pytest.mark.usefixtures("poisoned")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def random_weight(*shape: int, device: torch.device) -> BlockScaled:
    *leading, outputs, inputs = shape
    values = torch.randn(shape, device=device).mul(50).to(torch.float8_e4m3fn)
    return block_scaled(values, torch.rand(*leading, -(-outputs // 128), inputs // 128, device=device))


def random_choice(tokens: int, experts: int, choices: int, device: torch.device) -> torch.Tensor:
    return torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :choices].contiguous()


def random_layout(kind: str, tokens: int, experts: int, choices: int, device: torch.device) -> Layout:
    chosen = random_choice(tokens, experts, choices, device)
    if kind == "masked":
        return moe_permute.masked_layout(chosen, experts, tokens + 3)
    return moe_permute.contiguous_layout(chosen, experts, 128, -(-tokens * choices // 128) * 128 + experts * 128)


@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 128), (5, 1152), (3, 7168)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(rows, width + 8, device=device) * torch.logspace(-3, 3, width + 8, device=device)).to(dtype)
    x = x[:, :width]
    found, expected = triton_act_quant.quantize(x), act_quant.quantize(x)
    assert torch.allclose(found.scales, expected.scales, rtol=1e-6)
    assert error(dequantize(found), dequantize(expected)) <= QUANTIZED_ERROR


@pytest.mark.parametrize("shape", [(7, 2304), (4, 5, 512)])
@pytest.mark.parametrize("positions", [None, [[0, 6], [5, 1]]])
def test_gating_and_quantizing(shape: tuple[int, ...], positions: list[list[int]] | None, device: torch.device) -> None:
    gate_up = torch.randn(shape, device=device).bfloat16()
    used = None if positions is None else torch.tensor(positions, device=device)
    rows = slice(None) if used is None else used.flatten()
    found, expected = (
        dequantize(quantized).flatten(0, -2)[rows]
        for quantized in (triton_swiglu.swiglu_quantize(gate_up, used), swiglu.swiglu_quantize(gate_up))
    )
    assert error(found, expected) <= QUANTIZED_ERROR


def test_gating_no_rows(device: torch.device) -> None:
    assert triton_swiglu.swiglu_quantize(torch.empty(0, 512, device=device), None).values.shape == (0, 256)


@pytest.mark.parametrize(
    ("experts", "groups", "allowed", "choices"), [(256, 8, 4, 8), (24, 4, 2, 3), (6, 1, 1, 5), (12, 12, 5, 4)]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_the_gate(experts: int, groups: int, allowed: int, choices: int, normalize: bool, device: torch.device) -> None:
    logits, bias = torch.randn(9, experts, device=device), torch.randn(experts, device=device)
    settings = (choices, groups, allowed, normalize, 2.5)
    weights, chosen = triton_moe_gate.moe_gate(logits, bias, *settings)
    expected_weights, expected = moe_gate.moe_gate(logits, bias, *settings)
    order, expected_order = chosen.argsort(dim=1), expected.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
    assert error(weights.gather(1, order), expected_weights.gather(1, expected_order)) < 1e-6


def test_the_gate_chooses_distinct_experts_whatever_the_logits(device: torch.device) -> None:
    logits = torch.randn(4, 256, device=device)
    logits[0], logits[1, 5:], logits[2] = float("nan"), float("nan"), 0.0
    _, chosen = triton_moe_gate.moe_gate(logits, torch.zeros(256, device=device), 8, 8, 4, True, 2.5)
    assert all(len(set(row)) == 8 and set(row) <= set(range(256)) for row in chosen.tolist())
    assert set(range(5)) <= set(chosen[1].tolist())


def test_no_tokens_choose_nothing(device: torch.device) -> None:
    weights, chosen = triton_moe_gate.moe_gate(
        torch.empty(0, 8, device=device), torch.zeros(8, device=device), 2, 4, 2, True, 1.0
    )
    assert weights.shape == chosen.shape == (0, 2)


# The last three need several programs, which add up each other's counts, or several turns of one.
LAYOUTS = [(0, 4, 2), (1, 6, 3), (40, 6, 3), (400, 6, 3), (90, 512, 2), (700 if ON_GPU else 70, 300, 4)]


@pytest.mark.parametrize(("tokens", "experts", "choices"), LAYOUTS)
def test_masked_layouts(tokens: int, experts: int, choices: int, device: torch.device) -> None:
    chosen = random_choice(tokens, experts, choices, device)
    found = triton_moe_permute.masked_layout(chosen, experts, tokens + 1)
    expected = moe_permute.masked_layout(chosen, experts, tokens + 1)
    assert torch.equal(found.positions, expected.positions) and torch.equal(found.counts, expected.counts)


@pytest.mark.parametrize(("tokens", "experts", "choices"), LAYOUTS)
def test_contiguous_layouts(tokens: int, experts: int, choices: int, device: torch.device) -> None:
    chosen = random_choice(tokens, experts, choices, device)
    rows = -(-tokens * choices // 128) * 128 + experts * 128
    found = triton_moe_permute.contiguous_layout(chosen, experts, 128, rows)
    expected = moe_permute.contiguous_layout(chosen, experts, 128, rows)
    assert torch.equal(found.positions, expected.positions) and torch.equal(found.row_experts, expected.row_experts)


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("kind", ["masked", "contiguous"])
def test_expanding(tokens: int, kind: str, device: torch.device) -> None:
    x = act_quant.quantize(torch.randn(tokens, 1152, device=device))
    layout = random_layout(kind, tokens, 7, 3, device)
    found, expected = (module.expand_quantized(x, layout) for module in (triton_moe_permute, moe_permute))
    used = layout.positions.flatten()
    for one, other in (
        (found.values.view(torch.uint8), expected.values.view(torch.uint8)),
        (found.scales, expected.scales),
    ):
        assert torch.equal(one.flatten(0, -2)[used], other.flatten(0, -2)[used])


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combining(tokens: int, with_shared: bool, dtype: torch.dtype, device: torch.device) -> None:
    positions, weights = random_choice(tokens, 70, 3, device), torch.randn(tokens, 3, device=device)
    rows = torch.randn(70, 1200, device=device).to(dtype)
    shared = torch.randn(tokens, 1200, device=device).to(dtype) if with_shared else None
    found, expected = (module.combine(rows, positions, weights, shared) for module in (triton_moe_permute, moe_permute))
    assert error(found, expected) < (1e-6 if dtype == torch.float32 else 5e-3)


TILINGS = [
    None,
    Tiling(rows=16, outputs=64, swapped=True, stages=3, warps=4, splits=3),
    Tiling(rows=64, outputs=128, swapped=False, stages=3, warps=4, splits=2),
    Tiling(rows=32, outputs=128, swapped=True, stages=3, warps=4),
]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(0, 128, 128), (1, 192, 384), (17, 576, 512), (130, 64, 640)])
@pytest.mark.parametrize("tiling", TILINGS)
def test_a_linear_layer(rows: int, outputs: int, inputs: int, tiling: Tiling | None, device: torch.device) -> None:
    x = act_quant.quantize(torch.randn(rows, inputs, device=device))
    weight = random_weight(outputs, inputs, device=device)
    found = triton_fp8_gemm.fp8_gemm(x, weight, tiling)
    assert error(found, fp8_gemm.fp8_gemm(x, weight)) < 5e-3
    assert torch.equal(found, triton_fp8_gemm.fp8_gemm(x, weight, tiling)), "the sum depends on who came last"
    assert not weight.arrivals.any()


def used_rows(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    return rows.flatten(0, -2)[layout.positions.flatten()]


@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("kind", ["masked", "contiguous"])
def test_the_experts_linear_layers(tokens: int, kind: str, device: torch.device) -> None:
    layout = random_layout(kind, tokens, 5, 2, device)
    # Rows without a token stay poisoned.
    rows = moe_permute.expand_quantized(act_quant.quantize(torch.randn(tokens, 384, device=device)), layout)
    weight = random_weight(5, 256, 384, device=device)
    found = triton_grouped_gemm.grouped_fp8_gemm(rows, weight, layout)
    expected = grouped_gemm.grouped_fp8_gemm(rows, weight, layout)
    assert error(used_rows(found, layout), used_rows(expected, layout)) < 5e-3


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_an_experts_rows_may_need_several_tiles(rows: int, device: torch.device) -> None:
    layout = MaskedLayout(
        positions=torch.arange(70, device=device).view(70, 1),
        counts=torch.tensor([70, 0], dtype=torch.int32, device=device),
        capacity=75,
    )
    x = moe_permute.expand_quantized(act_quant.quantize(torch.randn(70, 128, device=device)), layout)
    weight = random_weight(2, 128, 128, device=device)
    tiling = Tiling(rows=rows, outputs=128, swapped=rows < 64, stages=3, warps=4)
    found = triton_grouped_gemm.grouped_fp8_gemm(x, weight, layout, tiling)
    expected = grouped_gemm.grouped_fp8_gemm(x, weight, layout)
    assert error(used_rows(found, layout), used_rows(expected, layout)) < 5e-3
