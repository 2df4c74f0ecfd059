"""The dense feed-forward layer of the first layers."""

import torch

from engine.model.linear import Linear
from engine.model.normalized import Normalized
from engine.model.parameters import Allocator, NamedParameters
from kernels.swiglu import swiglu, swiglu_quantize


class FeedForward:
    def __init__(self, hidden: int, intermediate: int, allocate: Allocator) -> None:
        self._gate_up = Linear(hidden, (intermediate, intermediate), allocate)
        self._down = Linear(intermediate, (hidden,), allocate)

    def parameters(self, prefix: str) -> NamedParameters:
        yield from self._gate_up.parameters(f"{prefix}.gate_proj", f"{prefix}.up_proj")
        yield from self._down.parameters(f"{prefix}.down_proj")

    @property
    def quantized(self) -> bool:
        """Whether it takes FP8 activations."""
        return self._gate_up.quantized

    def forward(self, hidden: Normalized) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        gate_up = self._gate_up.forward(hidden.for_layer(self._gate_up.quantized))
        return self._down.forward(swiglu_quantize(gate_up) if self._down.quantized else swiglu(gate_up))
