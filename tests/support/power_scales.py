"""Activations whose scales are powers of two, against the same activations with scales that are not."""

from collections.abc import Callable

import torch

from kernels.act_quant import Quantized, dequantize
from tests.support.errors import relative_error


def assert_rounded_up(quantize: Callable[[bool], Quantized]) -> None:
    """quantize: the same values each time; True asks for powers of two."""
    exact, found = quantize(False), quantize(True)
    assert found.powers and not exact.powers
    # In float64 logarithms of powers of two are whole, and those of their neighbours in float32 are not.
    rounded, scales = (each.scales.cpu().double() for each in (found, exact))
    assert torch.equal(rounded, scales.log2().ceil().exp2())
    assert relative_error(dequantize(found), dequantize(exact)) < 0.06
