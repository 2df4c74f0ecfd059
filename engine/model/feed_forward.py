"""The dense feed-forward layer: of the first layers, and of shared experts that are computed apart."""

from collections.abc import Set

import torch

from engine.model.activations import Activations, InputForm, Normalized
from engine.model.allocator import Allocator
from engine.model.parameters import NamedParameters, cut
from engine.model.quantization import LinearKind
from engine.model.share import ModelShare
from kernels.fp8_gemm import Workspace
from kernels.swiglu import swiglu, swiglu_quantize


class FeedForward:
    """With a share of the layer's width, outputs are parts of a sum over the ranks."""

    def __init__(self, hidden: int, intermediate: int, allocate: Allocator, share: ModelShare | None = None) -> None:
        """share: by default the whole width."""
        self._share = share or ModelShare()
        width = self._share.size(intermediate)
        self._gate_up = allocate.linear(LinearKind.FEED_FORWARD, hidden, (width, width))
        self._down = allocate.linear(LinearKind.FEED_FORWARD, width, (hidden,))
        # The forms in which it reads the tokens.
        self.input_forms: Set[InputForm] = frozenset({self._gate_up.input_form})

    def parameters(self, prefix: str) -> NamedParameters:
        yield from cut(self._gate_up.parameters(f"{prefix}.gate_proj", f"{prefix}.up_proj"), 0, self._share)
        yield from cut(self._down.parameters(f"{prefix}.down_proj"), 1, self._share)

    def finish(self) -> None:
        """Called once, when all parameters are filled."""
        self._gate_up.finish()
        self._down.finish()

    def forward(self, hidden: Normalized, workspace: Workspace) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        gate_up = self._gate_up.forward(hidden.in_form(self._gate_up.input_form), workspace)
        return self._down.forward(self._activated(gate_up), workspace)

    def _activated(self, gate_up: torch.Tensor) -> Activations:
        form = self._down.input_form
        return swiglu_quantize(gate_up, powers=form.powers) if form.quantized else swiglu(gate_up)
