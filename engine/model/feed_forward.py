"""The dense feed-forward layer: of the first layers, and of the shared experts."""

import torch
from torch.nn import functional

from engine.model.parameters import Allocator, NamedParameters
from kernels.swiglu import swiglu


class FeedForward:
    def __init__(self, hidden: int, intermediate: int, allocate: Allocator) -> None:
        self.intermediate = intermediate
        self.gate_up = allocate(2 * intermediate, hidden)
        self.down = allocate(hidden, intermediate)

    def parameters(self, prefix: str) -> NamedParameters:
        yield f"{prefix}.gate_proj.weight", self.gate_up[: self.intermediate]
        yield f"{prefix}.up_proj.weight", self.gate_up[self.intermediate :]
        yield f"{prefix}.down_proj.weight", self.down

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        return functional.linear(swiglu(functional.linear(hidden, self.gate_up)), self.down)
