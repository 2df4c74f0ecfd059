import pytest
import torch

from kernels.act_quant import dequantize
from kernels.norm import add_rms_norm, add_rms_norm_in_both_forms, add_rms_norm_quantized, join_rms_norms
from kernels.norm.reference import rms_norm


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_rows_are_scaled_to_unit_root_mean_square(rows: int) -> None:
    inputs, weights = (torch.randn(rows, 96) * 7, torch.randn(rows, 96)), (torch.randn(96), torch.randn(96))
    expected = [
        x.double() / (x.double().square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
        for x, weight in zip(inputs, weights, strict=True)
    ]
    joined = join_rms_norms(*inputs, *weights, 1e-6)
    assert torch.allclose(joined.double(), torch.cat(expected, dim=1), rtol=1e-5, atol=1e-6)


def test_epsilon_keeps_zero_rows_finite() -> None:
    assert torch.equal(rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_bfloat16_is_normalized_in_float32() -> None:
    # The squares of these exceed bfloat16's precision, and their sum its range of exact integers.
    x = torch.full((1, 512), 1000.0, dtype=torch.bfloat16)
    assert torch.allclose(rms_norm(x, torch.ones(512, dtype=torch.bfloat16), 1e-6).float(), torch.ones(1, 512))


def test_the_sum_stays_in_the_residual() -> None:
    delta, residual, weight = torch.randn(5, 16), torch.randn(5, 16), torch.randn(16)
    total = delta + residual
    assert torch.equal(add_rms_norm(delta, residual, weight, 1e-6), rms_norm(total, weight, 1e-6))
    assert torch.equal(residual, total)


def test_the_quantized_rows_are_those_that_are_returned() -> None:
    delta, residual, weight = torch.randn(5, 256), torch.randn(5, 256), torch.randn(256)
    expected = add_rms_norm(delta, residual.clone(), weight, 1e-6)
    alone = add_rms_norm_quantized(delta, residual.clone(), weight, 1e-6)
    normalized, quantized = add_rms_norm_in_both_forms(delta, residual, weight, 1e-6)
    assert torch.equal(normalized, expected)
    for found in (alone, quantized):
        assert (dequantize(found) - expected).norm() / expected.norm() < 0.04
