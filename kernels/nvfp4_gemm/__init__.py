"""Linear layers with NVFP4 weights and bfloat16 activations, exact in the weights' values.

Hopper has no products of four-bit numbers. Codes times their groups' scales have six significant bits: e4m3 would round
them, bfloat16 holds them. So they are expanded to bfloat16 on their way to the tensor cores, and the matrix's scale
multiplies the float32 sums.
"""

import torch

from kernels.nvfp4_gemm import reference
from kernels.nvfp4_gemm.arrangement import arranged
from kernels.nvfp4_gemm.weight import Nvfp4, nvfp4

__all__ = ["Nvfp4", "arranged", "nvfp4", "nvfp4_grouped_gemm"]


def nvfp4_grouped_gemm(x: torch.Tensor, weight: Nvfp4, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of expert e by its matrix transposed. Expert e has rows ends[e - 1] to ends[e].

    x: [rows, inputs] bfloat16, contiguous; ends: [experts] int32, ascending, the last one the number of rows, read on
    the device only. Returns [rows, outputs] bfloat16. On a GPU our kernel for Hopper computes it if the weight is
    `arranged` for that, else our Triton kernel; elsewhere the reference does.
    """
    experts, _, half = weight.codes.shape
    assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape[1] == 2 * half
    assert ends.shape == (experts,) and ends.dtype == torch.int32
    if weight.packed:
        # Imported only here: CUDA's bindings come with a CUDA build of torch.
        from kernels.nvfp4_gemm import warpgroups

        return warpgroups.nvfp4_grouped_gemm(x, weight, ends)
    if x.is_cuda:
        from kernels.nvfp4_gemm import triton

        return triton.nvfp4_grouped_gemm(x, weight, ends)
    return reference.nvfp4_grouped_gemm(x, weight, ends)
