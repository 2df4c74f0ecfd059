"""The gate of the feed-forward layers (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch

from kernels.act_quant.quantized import GROUP, Quantized
from kernels.swiglu import reference


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension.

    gate_up: [rows, 2 * width]. Returns a new contiguous [rows, width]; no rows give none.
    """
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    return reference.swiglu(gate_up)


def swiglu_quantize(gate_up: torch.Tensor, counts: torch.Tensor | None = None) -> Quantized:
    """silu(first half) * second half of the last dimension in float32, quantized in groups of 128.

    gate_up: [rows, 2 * width], or [experts, capacity, 2 * width] with counts [experts] int32: rows from an expert's
    count on may be left undefined. float32 or bfloat16, contiguous, width a multiple of 128. No rows give none.
    """
    assert gate_up.is_contiguous() and gate_up.shape[-1] % (2 * GROUP) == 0
    assert (gate_up.dim() == 2 and counts is None) or (counts is not None and counts.shape == gate_up.shape[:1])
    if gate_up.is_cuda:
        from kernels.swiglu import triton

        return triton.swiglu_quantize(gate_up, counts)
    return reference.swiglu_quantize(gate_up)
