"""Checks attention that writes its quantized outputs into some rows and columns of a larger tensor."""

from collections.abc import Callable

import torch

from kernels.act_quant import QuantizedRows, dequantize, empty_quantized, quantize

# The tensor's bytes beforehand.
BEFORE = 7


def assert_quantized_into_some(
    attend: Callable[[QuantizedRows], object], expected: torch.Tensor, first: int, column: int
) -> None:
    """Assert that `attend` writes `expected`, [rows, width], from row `first` and column `column` on, and nothing
    else.
    """
    rows, width = expected.shape
    stop, columns = first + rows, slice(column, column + width)
    out = empty_quantized(stop + 3, columns.stop + 128, device=expected.device)
    out.values.view(torch.uint8).fill_(BEFORE)
    out.scales.fill_(BEFORE)
    written = out.rows(first, stop).columns(columns.start, columns.stop)
    attend(written)
    # A mantissa of three bits has an error of about 2.7%.
    assert (dequantize(out)[first:stop, columns] - expected).norm() < 0.04 * expected.norm()
    # Scales differ a little: attend computes them from outputs that are not rounded to bf16 yet.
    assert torch.allclose(written.scales, quantize(expected).scales, rtol=0.005)
    written.values.view(torch.uint8).fill_(BEFORE)
    written.scales.fill_(BEFORE)
    assert (out.values.view(torch.uint8) == BEFORE).all() and (out.scales == BEFORE).all()
