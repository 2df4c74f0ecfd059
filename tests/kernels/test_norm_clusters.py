"""Residual addition, norm and quantization of a decode step's rows, on Hopper, against their definitions."""

import pytest
import torch

from bench.kernels.deepseek_r1 import HIDDEN
from kernels.act_quant import dequantize, empty_quantized
from kernels.moe_permute import ExpertOutputs
from kernels.moe_permute.reference import combine
from kernels.norm import add_rms_norm, add_rms_norm_in_both_forms, clusters, reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

EPSILON = 1e-6
# Relative norms: float32 sums in another order, and some values on the border of two bfloat16 or e4m3 numbers.
ERROR, QUANTIZED_ERROR = 1e-3, 1e-2
ROWS = [0, 1, 33, 96, clusters.MOST_ROWS]


def random(*shape: int, device: str = "cuda") -> torch.Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def random_outputs(
    rows: int, width: int, choices: int = 9, device: str = "cuda", *, shared: bool = False
) -> ExpertOutputs:
    positions = torch.randint(6 * 40, (rows, choices), device=device)
    weights = torch.randn(rows, choices, device=device)
    apart = random(rows, width, device=device) if shared else None
    return ExpertOutputs(random(6, 40, width, device=device), positions, weights, apart)


def assert_as_defined(delta: torch.Tensor | ExpertOutputs, residual: torch.Tensor, weight: torch.Tensor) -> None:
    assert clusters.takes(delta, residual)
    total, expected = residual.clone(), torch.empty_like(residual)
    expected_quantized = empty_quantized(*residual.shape, device=residual.device)
    added = combine(delta) if isinstance(delta, ExpertOutputs) else delta
    reference.add_rms_norm(added, total, weight, EPSILON, expected, expected_quantized)
    for is_plain, quantizes in ((True, False), (False, True), (True, True)):
        found, plain = residual.clone(), torch.empty_like(residual) if is_plain else None
        quantized = empty_quantized(*residual.shape, device=residual.device) if quantizes else None
        clusters.add_rms_norm(delta, found, weight, EPSILON, plain, quantized)
        assert relative_error(found, total) < ERROR
        assert plain is None or relative_error(plain, expected) < ERROR
        if quantized is not None:
            assert relative_error(quantized.scales, expected_quantized.scales) < ERROR
            assert relative_error(dequantize(quantized), dequantize(expected_quantized)) < QUANTIZED_ERROR


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1024, HIDDEN, 8192])
def test_a_layers_output_is_added_and_normalized(rows: int, width: int) -> None:
    assert_as_defined(random(rows, width + 8)[:, :width], random(rows, width) * 5, random(width))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1024, HIDDEN])
@pytest.mark.parametrize(("choices", "shared"), [(9, False), (8, False), (8, True), (7, False), (6, False), (5, True)])
def test_experts_outputs_are_added_up_and_normalized(rows: int, width: int, choices: int, shared: bool) -> None:
    assert_as_defined(random_outputs(rows, width, choices, shared=shared), random(rows, width), random(width))


@pytest.mark.gpu
@on_hopper
def test_other_types_and_widths_are_not_taken() -> None:
    residual = random(4, 1024)
    assert clusters.takes(random(4, 1024), residual)
    assert not clusters.takes(random(4, 1025)[:, 1:], residual)
    assert not clusters.takes(random(4, 1024).float(), residual.float())
    assert not clusters.takes(random(4, 640), random(4, 640))
    assert not clusters.takes(random_outputs(4, 1024, choices=4), residual)


@pytest.mark.parametrize("shared", [False, True])
def test_outputs_are_added_up_before_the_norm_on_cpu(shared: bool) -> None:
    outputs, weight = random_outputs(3, 128, device="cpu", shared=shared), random(128, device="cpu")
    residual = random(3, 128, device="cpu")
    total, expected_total = residual.clone(), residual.clone()
    expected = add_rms_norm(combine(outputs), expected_total, weight, EPSILON)
    assert torch.equal(add_rms_norm(outputs, total, weight, EPSILON), expected) and torch.equal(total, expected_total)
    normalized, quantized = add_rms_norm_in_both_forms(outputs, residual, weight, EPSILON)
    assert torch.equal(normalized, expected) and torch.equal(residual, expected_total)
    assert relative_error(dequantize(quantized), expected) < 0.04
