"""The block-scaled product of one row against the reference; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.act_quant import quantize
from kernels.fp8_gemm import block_scaled, reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

one_row = pytest.importorskip("kernels.fp8_gemm.one_row")

pytestmark = pytest.mark.usefixtures("poisoned")


def assert_as_defined(outputs: int, inputs: int, device: torch.device) -> None:
    values = torch.randn(outputs, inputs, device=device).mul(50).to(torch.float8_e4m3fn)
    weight = block_scaled(values, torch.rand(-(-outputs // 128), inputs // 128, device=device) + 0.1)
    x = quantize(torch.randn(1, inputs, device=device))
    assert relative_error(one_row.fp8_gemm(x, weight), reference.fp8_gemm(x, weight)) < 5e-3


# Outputs that do not fill blocks, and inputs that do not fill a program's tile.
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 384), (64, 128)])
def test_one_row_is_multiplied_by_the_weight(outputs: int, inputs: int, device: torch.device) -> None:
    assert_as_defined(outputs, inputs, device)


@pytest.mark.gpu
@on_hopper
# Moonlight's, GLM-4.7-Flash's.
@pytest.mark.parametrize(("outputs", "inputs"), [(3648, 2048), (2048, 2048), (1344, 2048), (5120, 768), (2048, 5120)])
def test_one_row_is_multiplied_by_published_weights(outputs: int, inputs: int) -> None:
    assert_as_defined(outputs, inputs, torch.device("cuda"))
