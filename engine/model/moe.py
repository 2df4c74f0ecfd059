"""Mixture of experts (DeepSeek-V3, 2024, section 2.1.2): shared ones for every token, routed ones by choice."""

import torch

from engine.model.config import ModelConfig
from engine.model.experts import Experts
from engine.model.gate import Gate
from engine.model.normalized import Normalized
from engine.model.parameters import Allocator, NamedParameters
from kernels.moe_permute import ExpertOutputs, combine
from kernels.norm import Delta

# Tokens whose copies for the experts exist at once: at DeepSeek's widths, nine a token, about 2.3 GB of workspace.
CHUNK_TOKENS = 8192


class MixtureOfExperts:
    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        self.gate = Gate(config, allocate)
        self._experts = Experts(config, allocate)

    def parameters(self, prefix: str) -> NamedParameters:
        yield from self.gate.parameters(f"{prefix}.gate")
        yield from self._experts.parameters(prefix)

    @property
    def quantized(self) -> bool:
        """Whether it takes FP8 activations."""
        return self._experts.quantized

    def forward(self, hidden: Normalized) -> Delta:
        """[tokens, hidden] to [tokens, hidden]; of one chunk's tokens the sums are left to whoever adds them."""
        tokens = hidden.tokens
        if tokens <= CHUNK_TOKENS:
            return self._chunk(hidden)
        out = torch.empty_like(hidden.plain)
        for start in range(0, tokens, CHUNK_TOKENS):
            chunk = slice(start, min(start + CHUNK_TOKENS, tokens))
            out[chunk] = combine(self._chunk(hidden.rows(chunk)))
        return out

    def _chunk(self, hidden: Normalized) -> ExpertOutputs:
        weights, experts = self.gate.choose(hidden.plain)
        placed = self._experts.place(hidden.for_layer(self._experts.quantized), experts)
        return ExpertOutputs(self._experts.forward(placed), placed.positions, weights)
