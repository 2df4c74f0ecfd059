"""Quantizes activations to FP8 as DeepSeek-V3 (2024), section 3.3.2: one scale for each token and 128 channels.

Scales are what brings a group's largest magnitude to e4m3's largest number, 448; or, as `scale_fmt: ue8m0` of
DeepSeek-V3.1's config.json asks, that rounded up to a power of two ("powers").
"""

import torch

from kernels.act_quant import reference
from kernels.act_quant.quantized import GROUP, Quantized, QuantizedRows, empty_quantized

__all__ = ["GROUP", "Quantized", "QuantizedRows", "dequantize", "empty_quantized", "quantize", "quantize_into"]


def quantize(x: torch.Tensor, *, powers: bool = False) -> Quantized:
    """x: [rows, width], float32 or bfloat16, width a multiple of 128, last dimension contiguous. No rows give no rows.

    powers: whether scales are powers of two.
    """
    out = empty_quantized(*x.shape, device=x.device, powers=powers)
    quantize_into(x, out.rows(0, len(x)))
    return out


def quantize_into(x: torch.Tensor, out: QuantizedRows) -> None:
    """As `quantize`, but writes to existing rows, as many as x has, in their form."""
    assert x.dim() == 2 and x.shape[1] % GROUP == 0 and x.stride(1) == 1 and out.values.shape == x.shape
    if x.is_cuda:
        from kernels.act_quant import triton

        triton.quantize_into(x, out)
    else:
        reference.quantize_into(x, out)


def dequantize(x: Quantized) -> torch.Tensor:
    """values * scales as float32, of the values' shape."""
    return reference.dequantize(x)
