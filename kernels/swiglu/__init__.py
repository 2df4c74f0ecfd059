"""The gate of the feed-forward layers (Shazeer, "GLU Variants Improve Transformer", 2020)."""

import torch

from kernels.swiglu import reference


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension.

    gate_up: [rows, 2 * width]. Returns a new contiguous [rows, width]; no rows give none. Backend: the reference.
    """
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0
    return reference.swiglu(gate_up)
