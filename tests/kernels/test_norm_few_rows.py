"""Residual, norm and logits of a few rows in one kernel, against their definitions, perhaps in the interpreter."""

import pytest
import torch

from kernels.act_quant import dequantize, quantize
from kernels.norm import reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

few_rows = pytest.importorskip("kernels.norm.few_rows")

EPSILON = 1e-5
pytestmark = pytest.mark.usefixtures("poisoned")


def assert_as_defined(rows: int, width: int, experts: int, device: torch.device, dtype: torch.dtype) -> None:
    delta, residual = (torch.randn(rows, 2 * width, device=device).bfloat16()[:, :width] for _ in range(2))
    residual, weight = residual.contiguous(), torch.randn(width, device=device).bfloat16()
    gate = torch.randn(experts, width, device=device, dtype=dtype)
    added, plain = residual.clone(), torch.empty_like(residual)
    reference.add_rms_norm(delta, added, weight, EPSILON, plain, None)
    for quantizes in (False, True):
        found = few_rows.add_rms_norm_and_logits(delta, residual, weight, EPSILON, gate, quantizes=quantizes)
        assert torch.equal(found.residual, added)
        assert relative_error(found.plain, plain) < 1e-3
        assert relative_error(found.logits.sum(0), found.plain.double() @ gate.double().t()) < 1e-5
        if found.quantized is not None:
            assert relative_error(dequantize(found.quantized), dequantize(quantize(found.plain))) < 1e-3
        assert (found.quantized is None) != quantizes


# A width and a number of experts that are no powers of two.
@pytest.mark.parametrize(("rows", "width", "experts"), [(1, 256, 16), (3, 384, 10)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_are_added_normalized_and_multiplied_by_the_gate(
    rows: int, width: int, experts: int, dtype: torch.dtype, device: torch.device
) -> None:
    assert_as_defined(rows, width, experts, device, dtype)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_published_gates_are_multiplied(rows: int, dtype: torch.dtype) -> None:
    assert_as_defined(rows, 2048, 64, torch.device("cuda"), dtype)
