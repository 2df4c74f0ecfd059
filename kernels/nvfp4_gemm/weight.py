"""Matrices in NVFP4, as they are published or in the order in which the product on Hopper takes them."""

from dataclasses import dataclass

import torch

from kernels.nvfp4_quant import GROUP

# The outputs of a part and the inputs are multiples of this.
MULTIPLE = 64


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
