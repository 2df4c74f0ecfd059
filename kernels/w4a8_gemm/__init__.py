"""The experts' linear layers with INT4 weights and FP8 activations.

Weights have a scale for each output and 128 inputs, activations one for each row or expert. Each 128 products along the
inputs are summed in the tensor cores, then scaled and summed in float32.
"""

import torch

from kernels.moe_permute.layout import Layout
from kernels.w4a8_gemm import reference
from kernels.w4a8_gemm.activations import ScaledRows
from kernels.w4a8_gemm.profile import profiled
from kernels.w4a8_gemm.weight import Int4Experts, int4_experts, pack_tiles, unpack_tiles

__all__ = ["Int4Experts", "ScaledRows", "int4_experts", "pack_tiles", "profiled", "unpack_tiles", "w4a8_grouped_gemm"]


def w4a8_grouped_gemm(x: ScaledRows, weight: Int4Experts, layout: Layout) -> torch.Tensor:
    """Each row times its expert's weight transposed.

    x: [rows, inputs] or [experts, capacity, inputs], as the layout has it. Returns bfloat16 of x's leading dimensions
    and `outputs`; rows that no token has are undefined. No rows give none. The counts are read on the device only. On a
    Hopper GPU: ours; the definition elsewhere.
    """
    experts, _, inputs = weight.shape
    assert x.values.shape == (*layout.shape, inputs)
    assert not x.static or x.scales.shape == (experts,)
    if x.values.is_cuda:
        # Only here: CUDA's bindings come with a CUDA build of torch.
        from kernels.w4a8_gemm import warpgroups

        if warpgroups.takes(weight):
            return warpgroups.w4a8_grouped_gemm(x, weight, layout)
    return reference.w4a8_grouped_gemm(x, weight, layout)
