"""Mixture of experts (DeepSeek-V3, 2024, section 2.1.2): shared experts for every token, routed ones by choice."""

import torch
from torch.nn import functional

from engine.model.config import ModelConfig
from engine.model.feed_forward import FeedForward
from engine.model.parameters import Allocator, NamedParameters
from kernels.grouped_gemm import grouped_gemm
from kernels.moe_gate import moe_gate
from kernels.moe_permute import combine, expand
from kernels.swiglu import swiglu


class MixtureOfExperts:
    def __init__(self, config: ModelConfig, allocate: Allocator) -> None:
        self.config = config
        hidden, experts, width = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
        # The choice is made in float32, whatever the model's dtype.
        self.gate = allocate(experts, hidden, dtype=torch.float32)
        self.bias = allocate(experts, dtype=torch.float32)
        self.gate_up = allocate(experts, 2 * width, hidden)
        self.down = allocate(experts, hidden, width)
        self.shared = FeedForward(hidden, width * config.n_shared_experts, allocate)

    def parameters(self, prefix: str) -> NamedParameters:
        yield f"{prefix}.gate.weight", self.gate
        yield f"{prefix}.gate.e_score_correction_bias", self.bias
        width = self.config.moe_intermediate_size
        for expert in range(self.config.n_routed_experts):
            name = f"{prefix}.experts.{expert}"
            yield f"{name}.gate_proj.weight", self.gate_up[expert, :width]
            yield f"{name}.up_proj.weight", self.gate_up[expert, width:]
            yield f"{name}.down_proj.weight", self.down[expert]
        yield from self.shared.parameters(f"{prefix}.shared_experts")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to [tokens, hidden]."""
        weights, experts = self._choose(hidden)
        expanded = expand(hidden, experts, self.config.n_routed_experts)
        inner = swiglu(grouped_gemm(expanded.rows, self.gate_up, expanded.ends))
        routed = combine(grouped_gemm(inner, self.down, expanded.ends), expanded.positions, weights)
        return routed.add_(self.shared.forward(hidden))

    def _choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        return moe_gate(
            functional.linear(hidden.float(), self.gate),
            self.bias,
            experts_per_token=config.num_experts_per_tok,
            groups=config.n_group,
            groups_per_token=config.topk_group,
            normalize=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
        )
