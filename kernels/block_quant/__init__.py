"""FP8 weights as DeepSeek publishes them: e4m3 in blocks of 128x128, one float32 scale a block (`weight_scale_inv`)."""

import torch

from kernels.block_quant import reference

BLOCK = reference.BLOCK


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize so that each block's largest magnitude becomes e4m3's largest number, 448.

    weight: [rows, columns], any float dtype; ragged last blocks are allowed.
    Returns (values [rows, columns] float8_e4m3fn, scale [ceil(rows/128), ceil(columns/128)] float32), with
    weight ~ values * scale. An all-zero block has scale 1. Backend: the reference.
    """
    assert weight.dim() == 2 and weight.is_floating_point()
    return reference.quantize_blocks(weight)


def dequantize_blocks(values: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Write values * scale, block by block, into `out` [rows, columns] of any float dtype, rounding once.

    values: [rows, columns] float8_e4m3fn; scale: [ceil(rows/128), ceil(columns/128)] float32. Zero rows write nothing.
    Backend: the reference.
    """
    rows, columns = values.shape
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert scale.shape == (-(-rows // BLOCK), -(-columns // BLOCK)) and out.shape == values.shape
    reference.dequantize_blocks(values, scale, out)
