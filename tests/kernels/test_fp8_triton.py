"""Triton's FP8 kernels against their definitions: ragged sizes on a GPU, small ones in the interpreter elsewhere."""

import pytest
import torch

from kernels.act_quant import dequantize, empty_quantized
from kernels.act_quant import reference as act_quant
from kernels.fp8_gemm import BlockScaled, block_scaled, make_workspace
from kernels.fp8_gemm import reference as fp8_gemm
from kernels.grouped_gemm import reference as grouped_gemm
from kernels.moe_permute import ExpandedQuantized
from kernels.moe_permute import reference as moe_permute
from kernels.swiglu import reference as swiglu
from tests.support.errors import relative_error

pytest.importorskip("triton")

from kernels.act_quant import triton as triton_act_quant
from kernels.fp8_gemm import triton as triton_fp8_gemm
from kernels.fp8_gemm.tiles import Tiling
from kernels.grouped_gemm import triton as triton_grouped_gemm
from kernels.swiglu import triton as triton_swiglu

QUANTIZED_ERROR = 5e-3
pytestmark = pytest.mark.usefixtures("poisoned")


def random_weight(*shape: int, device: torch.device) -> BlockScaled:
    *leading, outputs, inputs = shape
    values = torch.randn(shape, device=device).mul(50).to(torch.float8_e4m3fn)
    return block_scaled(values, torch.rand(*leading, -(-outputs // 128), inputs // 128, device=device))


def random_choice(tokens: int, experts: int, choices: int, device: torch.device) -> torch.Tensor:
    return torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :choices].contiguous()


def random_expansion(
    kind: str, tokens: int, experts: int, choices: int, width: int, device: torch.device
) -> ExpandedQuantized:
    x = act_quant.quantize(torch.randn(tokens, width, device=device))
    chosen = random_choice(tokens, experts, choices, device)
    if kind == "masked":
        return moe_permute.expand_masked(x, chosen, experts, tokens + 3)
    rows = -(-tokens * choices // 128) * 128 + experts * 128
    return moe_permute.expand_contiguous(x, chosen, experts, 128, rows)


@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 128), (5, 1152), (3, 7168)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_quantized(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(rows, width + 8, device=device) * torch.logspace(-3, 3, width + 8, device=device)).to(dtype)
    x = x[:, :width]
    found, expected = empty_quantized(rows, width, device=device), act_quant.quantize(x)
    triton_act_quant.quantize_into(x, found.rows(0, rows))
    assert torch.allclose(found.scales, expected.scales, rtol=1e-6)
    assert relative_error(dequantize(found), dequantize(expected)) <= QUANTIZED_ERROR


def test_rows_are_quantized_into_some_of_many(device: torch.device) -> None:
    x, found = torch.randn(5, 256, device=device), empty_quantized(11, 256, device=device)
    found.values.view(torch.uint8).fill_(7)
    found.scales.fill_(7)
    triton_act_quant.quantize_into(x, found.rows(3, 8))
    expected = act_quant.quantize(x)
    assert torch.equal(found.values[3:8].float(), expected.values.float())
    assert torch.allclose(found.scales[3:8], expected.scales, rtol=1e-6)
    outside = [0, 1, 2, 8, 9, 10]
    assert (found.values.view(torch.uint8)[outside] == 7).all() and (found.scales[outside] == 7).all()


def test_rows_are_quantized_into_some_columns(device: torch.device) -> None:
    x, found = torch.randn(5, 256, device=device), empty_quantized(7, 640, device=device)
    found.values.view(torch.uint8).fill_(7)
    found.scales.fill_(7)
    triton_act_quant.quantize_into(x, found.rows(1, 6).columns(128, 384))
    expected = act_quant.quantize(x)
    assert torch.equal(found.values[1:6, 128:384].float(), expected.values.float())
    assert torch.allclose(found.scales[1:6, 1:3], expected.scales, rtol=1e-6)
    values, scales = found.values.view(torch.uint8), found.scales
    values[1:6, 128:384], scales[1:6, 1:3] = 7, 7
    assert (values == 7).all() and (scales == 7).all()


@pytest.mark.parametrize("shape", [(7, 2304), (4, 5, 512)])
@pytest.mark.parametrize("positions", [None, [[0, 6], [5, 1]]])
def test_rows_are_gated_and_quantized(
    shape: tuple[int, ...], positions: list[list[int]] | None, device: torch.device
) -> None:
    gate_up = torch.randn(shape, device=device).bfloat16()
    used = None if positions is None else torch.tensor(positions, device=device)
    rows = slice(None) if used is None else used.flatten()
    found, expected = (
        dequantize(quantized).flatten(0, -2)[rows]
        for quantized in (triton_swiglu.swiglu_quantize(gate_up, used), swiglu.swiglu_quantize(gate_up))
    )
    assert relative_error(found, expected) <= QUANTIZED_ERROR


def test_no_rows_are_gated_to_none(device: torch.device) -> None:
    assert triton_swiglu.swiglu_quantize(torch.empty(0, 512, device=device), None).values.shape == (0, 256)


TILINGS = [
    None,
    Tiling(rows=16, outputs=64, swapped=True, stages=3, warps=4, splits=3),
    Tiling(rows=64, outputs=128, swapped=False, stages=3, warps=4, splits=2),
    Tiling(rows=32, outputs=128, swapped=True, stages=3, warps=4),
]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(0, 128, 128), (1, 192, 384), (17, 576, 512), (130, 64, 640)])
@pytest.mark.parametrize("tiling", TILINGS)
def test_rows_are_multiplied_by_the_weight(
    rows: int, outputs: int, inputs: int, tiling: Tiling | None, device: torch.device
) -> None:
    x = act_quant.quantize(torch.randn(rows, inputs, device=device))
    weight = random_weight(outputs, inputs, device=device)
    workspace = make_workspace(device)
    found = triton_fp8_gemm.fp8_gemm(x, weight, workspace, tiling)
    assert relative_error(found, fp8_gemm.fp8_gemm(x, weight)) < 5e-3
    again = triton_fp8_gemm.fp8_gemm(x, weight, workspace, tiling)
    assert torch.equal(found, again), "the sum depends on who came last"
    assert not workspace.arrivals.any()


def used_rows(rows: torch.Tensor, expanded: ExpandedQuantized) -> torch.Tensor:
    return rows.flatten(0, -2)[expanded.positions.flatten()]


@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("kind", ["masked", "contiguous"])
def test_rows_are_multiplied_by_their_experts_weights(tokens: int, kind: str, device: torch.device) -> None:
    # Rows without a token stay poisoned.
    x = random_expansion(kind, tokens, 5, 2, 384, device)
    weight = random_weight(5, 256, 384, device=device)
    found = triton_grouped_gemm.grouped_fp8_gemm(x.rows, weight, x.layout)
    expected = grouped_gemm.grouped_fp8_gemm(x.rows, weight, x.layout)
    assert relative_error(used_rows(found, x), used_rows(expected, x)) < 5e-3


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_an_experts_rows_may_need_several_tiles(rows: int, device: torch.device) -> None:
    tokens = act_quant.quantize(torch.randn(70, 128, device=device))
    x = moe_permute.expand_masked(tokens, torch.zeros(70, 1, dtype=torch.int64, device=device), 2, 75)
    weight = random_weight(2, 128, 128, device=device)
    tiling = Tiling(rows=rows, outputs=128, swapped=rows < 64, stages=3, warps=4)
    found = triton_grouped_gemm.grouped_fp8_gemm(x.rows, weight, x.layout, tiling)
    expected = grouped_gemm.grouped_fp8_gemm(x.rows, weight, x.layout)
    assert relative_error(used_rows(found, x), used_rows(expected, x)) < 5e-3
