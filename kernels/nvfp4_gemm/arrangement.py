"""Putting weights into the order in which the product on their device takes them, after loading."""

from dataclasses import replace

import torch

from kernels.nvfp4_gemm.packing import CODE_BYTES, SCALE_BYTES, TILE_INPUTS, TILE_OUTPUTS, pack
from kernels.nvfp4_gemm.weight import Nvfp4

# How many outputs are packed at a time, which takes some 40 bytes a weight.
STRIP_OUTPUTS = 1024


def arranged(weight: Nvfp4) -> Nvfp4:
    """`weight` in the order in which the product on its device is fastest; called once, after loading.

    On Hopper codes and scales are packed where they lie, expert by expert, which takes about an expert's bytes
    meanwhile. Elsewhere, and if inputs are not a multiple of 128, they stay as they are published.
    """
    if not weight.codes.is_cuda:
        return weight
    # Imported only here: CUDA's bindings come with a CUDA build of torch.
    from kernels.nvfp4_gemm import warpgroups

    if weight.packed or not warpgroups.takes(weight):
        return weight
    for codes, scales in zip(weight.codes, weight.scales.view(torch.uint8), strict=True):
        _pack_in_place(codes, scales)
    return replace(weight, packed=True)


def _pack_in_place(codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Pack the codes and scales of one expert, scales as uint8."""
    outputs, half = codes.shape
    leading = 2 * half // TILE_INPUTS, outputs // TILE_OUTPUTS
    new_codes, new_scales = codes.new_empty(*leading, CODE_BYTES), scales.new_empty(*leading, SCALE_BYTES)
    for first in range(0, outputs, STRIP_OUTPUTS):
        rows = slice(first, first + STRIP_OUTPUTS)
        tiles = slice(first // TILE_OUTPUTS, (first + STRIP_OUTPUTS) // TILE_OUTPUTS)
        new_codes[:, tiles], new_scales[:, tiles] = pack(codes[rows], scales[rows].view(torch.float8_e4m3fn))
    codes.copy_(new_codes.view(codes.shape))
    scales.copy_(new_scales.view(scales.shape))
