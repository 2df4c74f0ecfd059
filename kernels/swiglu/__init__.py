"""The gate of the feed-forward layers (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch

from kernels.act_quant.quantized import GROUP, Quantized
from kernels.swiglu import reference


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension. In bfloat16 on a GPU rounded once.

    gate_up: [rows, 2 * width]. Returns a new contiguous [rows, width]; no rows give none.
    """
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    if gate_up.is_cuda and gate_up.dtype == torch.bfloat16 and gate_up.is_contiguous():
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.swiglu import triton

        return triton.swiglu(gate_up)
    return reference.swiglu(gate_up)


def swiglu_quantize(gate_up: torch.Tensor, positions: torch.Tensor | None = None, *, powers: bool = False) -> Quantized:
    """silu(first half) * second half of the last dimension in float32, quantized in groups of 128.

    gate_up: [rows, 2 * width] or [experts, capacity, 2 * width], float32 or bfloat16, contiguous, width a multiple of
    128. positions: int64 of any shape, the rows to compute, counted over all experts; other rows may be left undefined,
    and negative ones name none. None: all rows. No rows give none. powers: whether scales are powers of two.
    """
    assert gate_up.is_contiguous() and gate_up.shape[-1] % (2 * GROUP) == 0
    assert positions is None or (positions.dtype == torch.int64 and positions.is_contiguous())
    if gate_up.is_cuda:
        # Imported here: CUDA's bindings and Triton come with a CUDA build of torch.
        from kernels.swiglu import bf16, triton

        if bf16.takes(gate_up):
            return bf16.swiglu_quantize(gate_up, positions, powers)
        return triton.swiglu_quantize(gate_up, positions, powers)
    return reference.swiglu_quantize(gate_up, powers)
