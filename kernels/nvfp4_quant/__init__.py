"""NVFP4 weights as they are published: e2m1 codes in groups of 16 inputs with an e4m3 scale each, two codes a byte, and
one float32 scale over the whole matrix.
"""

import torch

from kernels.nvfp4_quant import reference

GROUP = reference.GROUP


def quantize_nvfp4(
    weight: torch.Tensor, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round so that each group's largest magnitude becomes 6, e2m1's largest, and `largest` becomes 6 times a scale of
    448, e4m3's largest. Each value gets the nearest code, or the even one of two.

    weight: [outputs, inputs], any float dtype, inputs a multiple of 16; largest: [] float32, at least the weight's
    largest magnitude, which is the default: matrices that shall have one global scale are given the largest of all.
    Returns (codes [outputs, inputs / 2] uint8, the first of two in the low half, scales [outputs, inputs / 16]
    float8_e4m3fn, global scale [] float32), with weight ~ values of codes * scales * global scale. Backend: the
    reference.
    """
    assert weight.dim() == 2 and weight.is_floating_point() and weight.shape[1] % GROUP == 0
    return reference.quantize_nvfp4(weight, largest)


def dequantize_nvfp4(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of codes * scales, which have six significant bits and are exact in bfloat16 too.

    codes: [..., outputs, inputs / 2] uint8; scales: [..., outputs, inputs / 16] float8_e4m3fn. Returns [..., outputs,
    inputs] float32, to be multiplied by the global scale. Backend: the reference.
    """
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
    assert codes.shape[:-1] == scales.shape[:-1] and codes.shape[-1] * 2 == scales.shape[-1] * GROUP
    return reference.dequantize_nvfp4(codes, scales)
