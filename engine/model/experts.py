"""The experts' feed-forward layers, computed together as grouped products: those that are chosen, then the shared."""

import torch

from engine.model.config import ModelConfig
from engine.model.linear import weight_parameters
from engine.model.parameters import Allocator, NamedParameters, joined_columns, joined_rows
from kernels.act_quant import Quantized
from kernels.fp8_gemm import BlockScaled
from kernels.grouped_gemm import grouped_fp8_gemm, grouped_gemm
from kernels.moe_permute import Expanded, ExpandedQuantized, expand, expand_quantized
from kernels.swiglu import swiglu, swiglu_quantize

# Copies of tokens, each where its expert reads it.
Placed = Expanded | ExpandedQuantized


class Experts:
    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        self._routed, self._shared = config.n_routed_experts, config.n_shared_experts
        self._hidden, self._width = hidden, width = config.hidden_size, config.moe_intermediate_size
        self._count = count = self._routed + self._shared
        self._gate_up = allocate.weight(count, 2 * width, hidden, parts=(width, width))
        self._down = allocate.weight(count, hidden, width, parts=(hidden,))
        if type(self._gate_up) is not type(self._down):
            # Widths that FP8 products do not take on one side.
            self._gate_up = allocate(count, 2 * width, hidden)
            self._down = allocate(count, hidden, width)

    @property
    def quantized(self) -> bool:
        """Whether they take FP8 activations."""
        return isinstance(self._gate_up, BlockScaled)

    def parameters(self, prefix: str) -> NamedParameters:
        for expert in range(self._routed):
            yield from self._gate_and_up(f"{prefix}.experts.{expert}", expert)
            yield from self._downs(f"{prefix}.experts.{expert}", expert)
        # Published as one layer that is as wide as all of them.
        shared, name = slice(self._routed, self._count), f"{prefix}.shared_experts"
        yield from ((published, joined_rows(parts)) for published, parts in self._gate_and_up(name, shared))
        yield from ((published, joined_columns(parts)) for published, parts in self._downs(name, shared))

    def _gate_and_up(self, name: str, experts: int | slice) -> NamedParameters:
        width = self._width
        yield from weight_parameters(f"{name}.gate_proj.weight", self._gate_up, slice(0, width), experts)
        yield from weight_parameters(f"{name}.up_proj.weight", self._gate_up, slice(width, 2 * width), experts)

    def _downs(self, name: str, experts: int | slice) -> NamedParameters:
        yield from weight_parameters(f"{name}.down_proj.weight", self._down, slice(0, self._hidden), experts)

    def place(self, hidden: torch.Tensor | Quantized, experts: torch.Tensor) -> Placed:
        """Copies of the tokens, each where its expert reads it.

        hidden: [tokens, hidden], quantized where the experts are; experts: [tokens, experts per token], the shared ones
        last.
        """
        if isinstance(hidden, Quantized):
            return expand_quantized(hidden, experts, self._count, self._shared)
        return expand(hidden, experts, self._count)

    def forward(self, placed: Placed) -> torch.Tensor:
        """What the experts make of it: rows as `ExpertOutputs` has them, with the positions of `placed`."""
        if isinstance(placed, ExpandedQuantized):
            assert isinstance(self._gate_up, BlockScaled) and isinstance(self._down, BlockScaled)
            layout = placed.layout
            inner = grouped_fp8_gemm(placed.rows, self._gate_up, layout)
            return grouped_fp8_gemm(swiglu_quantize(inner, layout.positions), self._down, layout)
        assert isinstance(self._gate_up, torch.Tensor) and isinstance(self._down, torch.Tensor)
        inner = swiglu(grouped_gemm(placed.rows, self._gate_up, placed.ends))
        return grouped_gemm(inner, self._down, placed.ends)
