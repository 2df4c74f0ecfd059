"""Matrices in NVFP4, as they are published or in the order in which the product on Hopper takes them."""

from dataclasses import dataclass, replace

import torch

from kernels.nvfp4_gemm.packing import CODE_BYTES, SCALE_BYTES, TILE_INPUTS, TILE_OUTPUTS, pack
from kernels.nvfp4_quant import GROUP

# The outputs of a part and the inputs are multiples of this.
MULTIPLE = 64
# How many outputs are packed at a time, which takes some 40 bytes a weight.
STRIP_OUTPUTS = 1024


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """w = values of codes * scales * global scales; the matrices of several experts, each of equal parts one after
    another, as gate and up are.
    """

    # [experts, outputs, inputs / 2] uint8, contiguous.
    codes: torch.Tensor
    # [experts, outputs, inputs / 16] float8_e4m3fn, contiguous.
    scales: torch.Tensor
    # [experts, parts] float32, contiguous.
    global_scales: torch.Tensor
    # Whether an expert's bytes in codes and scales are ordered as `packing` says.
    packed: bool = False

    @property
    def part_rows(self) -> int:
        """Outputs of a part."""
        return self.codes.shape[1] // self.global_scales.shape[1]


def nvfp4(codes: torch.Tensor, scales: torch.Tensor, global_scales: torch.Tensor) -> Nvfp4:
    """Shapes and dtypes as `Nvfp4` has them; outputs of a part and inputs are multiples of 64."""
    experts, outputs, half = codes.shape
    parts = global_scales.shape[1]
    assert codes.dtype == torch.uint8 and codes.is_contiguous() and 2 * half % MULTIPLE == 0
    assert scales.shape == (experts, outputs, 2 * half // GROUP) and scales.is_contiguous()
    assert scales.dtype == torch.float8_e4m3fn
    assert global_scales.shape == (experts, parts) and global_scales.dtype == torch.float32
    assert outputs % (parts * MULTIPLE) == 0
    return Nvfp4(codes, scales, global_scales)


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
