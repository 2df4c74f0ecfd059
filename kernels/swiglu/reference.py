"""SwiGLU in plain torch, the definition."""

import torch
from torch.nn import functional


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return functional.silu(gate).mul_(up)
