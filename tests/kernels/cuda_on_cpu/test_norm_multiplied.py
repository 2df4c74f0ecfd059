"""A product of one row, perhaps after a norm, on the CPU."""

import pytest
import torch

from kernels.fp8_gemm import block_scaled
from kernels.moe_permute import NOWHERE, ExpertOutputs, combine
from kernels.norm import Matrix, reference
from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error

FORMATS = pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp8"])


def random_matrix(outputs: int, inputs: int, *, scaled: bool) -> tuple[Matrix, torch.Tensor]:
    """And the same in float32."""
    if not scaled:
        plain = torch.randn(outputs, inputs).bfloat16()
        return plain, plain.float()
    values = torch.randn(outputs, inputs).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // 128), inputs // 128) + 0.1
    return block_scaled(values, scales), values.float() * scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(
        128, 1
    )


# Fewer inputs than all warps have, outputs that do not fill a CTA, and magnitudes beyond float16.
@FORMATS
@pytest.mark.parametrize(("outputs", "width", "size"), [(200, 384, 1.0), (20, 2048, 1e5)])
def test_a_row_is_added_normalized_and_multiplied(
    outputs: int, width: int, size: float, scaled: bool, on_cpu: CudaOnCpu
) -> None:
    multiplied = on_cpu.module("norm.multiplied")
    matrix, plain = random_matrix(outputs, width, scaled=scaled)
    rows, positions = torch.randn(5, width).bfloat16(), torch.tensor([[3, 0, NOWHERE, 1, 4]])
    rows[2] = float("nan")
    residual, weight = torch.randn(1, width).bfloat16(), (torch.randn(width) * size).bfloat16()
    for delta in (ExpertOutputs(rows, positions, torch.rand(1, 5)), torch.randn(1, width).bfloat16()):
        assert multiplied.takes(delta, matrix)
        expected, normalized = residual.clone(), torch.empty_like(residual)
        change = combine(delta) if isinstance(delta, ExpertOutputs) else delta
        reference.add_rms_norm(change, expected, weight, 1e-5, normalized, None)
        added, product = multiplied.add_rms_norm_and_multiply(delta, residual, weight, 1e-5, matrix)
        assert relative_error(added, expected) < 2e-3
        assert relative_error(product, normalized.float() @ plain.t()) < 5e-3


@FORMATS
def test_a_row_is_normalized_and_multiplied_without_a_residual(scaled: bool, on_cpu: CudaOnCpu) -> None:
    multiplied = on_cpu.module("norm.multiplied")
    matrix, plain = random_matrix(40, 768, scaled=scaled)
    x, weight, normalized = torch.randn(1, 768).bfloat16(), torch.randn(768).bfloat16(), torch.empty(1, 768).bfloat16()
    reference.add_rms_norm(x, torch.zeros_like(x), weight, 1e-5, normalized, None)
    found = multiplied.rms_norm_and_multiply(x, weight, 1e-5, matrix)
    assert relative_error(found, normalized.float() @ plain.t()) < 5e-3


@FORMATS
def test_a_row_is_multiplied_as_it_is(scaled: bool, on_cpu: CudaOnCpu) -> None:
    row_products = on_cpu.module("linear.row_products")
    matrix, plain = random_matrix(40, 5120, scaled=scaled)
    x = torch.randn(1, 5120).bfloat16()
    assert row_products.takes(1, x.dtype, matrix)
    assert relative_error(row_products.multiply(x, matrix), x.float() @ plain.t()) < 5e-3
