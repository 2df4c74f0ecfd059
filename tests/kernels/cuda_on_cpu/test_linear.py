"""FP8 linear layers on the CPU."""

import pytest
import torch

from kernels.act_quant import Quantized
from kernels.act_quant.reference import quantize
from kernels.fp8_gemm import BlockScaled, block_scaled, reference
from kernels.grouped_gemm import reference as grouped
from kernels.moe_permute import expand_contiguous
from kernels.moe_permute.layout import ContiguousLayout
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error


def random_weight(*shape: int) -> BlockScaled:
    *experts, outputs, inputs = shape
    values = (torch.randn(*shape) * 60).to(torch.float8_e4m3fn)
    return block_scaled(values, torch.rand(*experts, -(-outputs // 128), inputs // 128) + 0.1)


def random_product(rows: int, outputs: int, inputs: int) -> tuple[Quantized, BlockScaled]:
    return quantize(torch.randn(rows, inputs).bfloat16()), random_weight(outputs, inputs)


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(5, 192, 384), (96, 192, 512)])
def test_few_rows_are_multiplied_by_the_weight(rows: int, outputs: int, inputs: int, on_cpu: CudaOnCpu) -> None:
    x, weight = random_product(rows, outputs, inputs)
    found = on_cpu.module("fp8_gemm.few_rows").fp8_gemm(x, weight)
    assert relative_error(found, reference.fp8_gemm(x, weight)) < 1e-3


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 128), (100, 448, 896), (150, 192, 1920)])
def test_many_rows_are_multiplied_by_the_weight(rows: int, outputs: int, inputs: int, on_cpu: CudaOnCpu) -> None:
    x, weight = random_product(rows, outputs, inputs)
    found = on_cpu.module("fp8_gemm.many_rows").fp8_gemm(x, weight)
    assert relative_error(found, reference.fp8_gemm(x, weight)) < 1e-3


def test_rows_are_multiplied_by_their_experts_weights(on_cpu: CudaOnCpu) -> None:
    # The third expert has no rows.
    chosen = torch.tensor([0, 1, 3]).repeat(100).unsqueeze(1)
    weight = random_weight(4, 320, 384)
    x = expand_contiguous(quantize(torch.randn(len(chosen), 384).bfloat16()), chosen, 4)
    assert isinstance(x.layout, ContiguousLayout)
    used = x.positions.flatten()
    found = on_cpu.module("fp8_gemm.many_rows").sorted_fp8_gemm(x.rows, weight, x.layout.row_experts)
    expected = grouped.grouped_fp8_gemm(x.rows, weight, x.layout)
    assert relative_error(found[used], expected[used]) < 1e-3
