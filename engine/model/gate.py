"""Which experts each token goes to, and with which weights: the chosen ones, then shared ones."""

import torch

from engine.model.activations import Normalized
from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.parameters import NamedParameters, whole
from kernels.linear import multiply_in_shares
from kernels.moe_gate import Listed, Routing, add_rms_norm_and_choose, chooses_at_once, moe_gate


class Gate:
    def __init__(self, config: ModelConfig, allocate: Allocator, shared: int) -> None:
        """shared: experts, after the routed ones, to which every token goes with a weight of 1."""
        self._routing = Routing(
            experts_per_token=config.num_experts_per_tok,
            groups=config.n_group,
            groups_per_token=config.topk_group,
            normalize=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            shared=shared,
            softmax=config.scoring_func == "softmax",
        )
        # [experts, hidden]
        self.weight = allocate(config.n_routed_experts, config.hidden_size, dtype=allocate.formats.gate_dtype)
        self._bias = allocate(config.n_routed_experts, dtype=torch.float32)
        # Only gates that balance themselves by a bias have one in the checkpoint.
        self._has_bias = config.topk_method == "noaux_tc"
        if not self._has_bias:
            self._bias.zero_()

    def parameters(self, prefix: str) -> NamedParameters:
        yield whole(f"{prefix}.weight", self.weight)
        if self._has_bias:
            yield whole(f"{prefix}.e_score_correction_bias", self._bias)

    def choose(self, hidden: Normalized, counted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [tokens, hidden], plain. Returns (weights float32, experts int64), both [tokens, experts per token].

        counted: [tokens] bool; tokens that are not counted have no expert. None if all are.
        """
        return moe_gate(self.logits(hidden), self._bias, self._routing, counted)

    def add_norm_and_choose(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
        counted: torch.Tensor | None,
    ) -> Listed | None:
        """`choose` for rows to which a delta is added first; None where no kernel does all at once.

        Arguments as `kernels.moe_gate.add_rms_norm_and_choose` takes them.
        """
        if not chooses_at_once(delta, self.weight, self._routing):
            return None
        bias = self.bias(delta)
        return add_rms_norm_and_choose(delta, residual, norm, epsilon, self.weight, bias, self._routing, counted)

    def bias(self, rows: torch.Tensor) -> torch.Tensor:
        """What is added to the affinities of these rows for their choice: [experts] float32, or [rows, experts]."""
        return self._bias

    def logits(self, hidden: Normalized) -> torch.Tensor:
        """Logits in shares, as `moe_gate` takes them: [shares, tokens, experts] float32."""
        return multiply_in_shares(hidden.unquantized(), self.weight) if hidden.logits is None else hidden.logits
