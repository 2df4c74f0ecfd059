"""SwiGLU with quantization of bfloat16 rows, on Hopper, against its definition."""

import pytest
import torch

from kernels.act_quant import Quantized, dequantize
from kernels.swiglu import bf16, reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Relative norms: approximate exponentials, and some values on the border of two e4m3 numbers.
SCALE_ERROR, ERROR = 1e-5, 1e-2


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul(3).bfloat16()


def assert_near(found: Quantized, expected: Quantized, rows: torch.Tensor) -> None:
    """rows: which rows to compare, counted over all experts."""
    scales, expected_scales = (each.scales.flatten(0, -2)[rows] for each in (found, expected))
    assert relative_error(scales, expected_scales) < SCALE_ERROR
    values, expected_values = (dequantize(each).flatten(0, -2)[rows] for each in (found, expected))
    assert relative_error(values, expected_values) < ERROR


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", [1, 3, 96, 700])
# Fewer values than a CTA has, a CTA's, a CTA's and some more, and nine CTAs'.
@pytest.mark.parametrize("width", [128, 384, 2048, 2176, 18432])
def test_all_rows_are_gated_and_quantized(rows: int, width: int) -> None:
    gate_up = random(rows, 2 * width)
    assert bf16.takes(gate_up)
    expected = reference.swiglu_quantize(gate_up)
    assert_near(bf16.swiglu_quantize(gate_up, None), expected, torch.arange(rows, device="cuda"))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("used", [1, 2, 40])
def test_only_the_given_rows_are_computed(used: int) -> None:
    gate_up = random(5, 12, 2 * 640)
    positions = torch.randperm(60, device="cuda")[:used]
    found = bf16.swiglu_quantize(gate_up, positions.view(-1, 1))
    assert_near(found, reference.swiglu_quantize(gate_up), positions)
    # Rows that no CTA wrote are still poisoned.
    assert int(found.scales.isnan().any(dim=-1).sum()) == 60 - used


@pytest.mark.gpu
@on_hopper
def test_gates_far_from_zero_pass_nothing_or_everything() -> None:
    up = torch.full((1, 128), 2.0, device="cuda", dtype=torch.bfloat16)
    closed, zero, opened = (
        dequantize(bf16.swiglu_quantize(torch.cat([torch.full_like(up, gate), up], dim=1), None))
        for gate in (-1000.0, 0.0, 1000.0)
    )
    assert not closed.any() and not zero.any() and torch.allclose(opened, torch.full_like(opened, 2000))


@pytest.mark.gpu
@on_hopper
def test_no_rows_are_gated_to_none() -> None:
    found = bf16.swiglu_quantize(random(0, 512), None)
    assert found.values.shape == (0, 256) and found.scales.shape == (0, 2)


@pytest.mark.gpu
@on_hopper
def test_other_types_and_unaligned_rows_are_not_taken() -> None:
    assert not bf16.takes(random(2, 256).float())
    assert not bf16.takes(random(2 * 256 + 1)[1:].view(2, 256))
