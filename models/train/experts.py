"""Mixture of experts with the gate of DeepSeek-V3, balanced without auxiliary loss (technical report, 2.1.2)."""

import torch
from torch import nn
from torch.nn import functional

from engine.model.config import ModelConfig
from models.train.layers import FeedForward, linear


class Gate(nn.Module):
    """Chooses experts by sigmoid scores plus a bias, among those of the best groups (`noaux_tc`)."""

    bias: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5)
        # No gradient trains the bias: `balance` moves it.
        self.register_buffer("bias", torch.zeros(config.n_routed_experts))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, hidden]. Returns weights [tokens, experts], 0 where not chosen, and the load [experts]."""
        config = self.config
        scores = functional.linear(x.float(), self.weight).sigmoid()
        biased = (scores + self.bias).detach()
        groups = biased.unflatten(-1, (config.n_group, -1))
        group_score = (groups * best(groups, 2)).sum(-1)
        allowed = best(group_score, config.topk_group)[..., None].expand_as(groups).flatten(-2)
        chosen = best(biased.masked_fill(~allowed, float("-inf")), config.num_experts_per_tok)
        weights = scores * chosen
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * config.routed_scaling_factor, chosen.sum(0)

    @torch.no_grad()
    def balance(self, load: torch.Tensor, speed: torch.Tensor) -> None:
        """Move the bias by `speed`, a scalar: up for experts chosen less than the mean, down for those chosen more.
        That of a gate that does not learn stays.
        """
        if not self.weight.requires_grad:
            return
        load = load.float()
        self.bias += speed * (load.mean() - load).sign()


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """bool, true at the `count` largest of the last dimension. The first of equal values wins.

    It compares all pairs: for a few experts that fuses with the surrounding kernels, which a sort does not.
    """
    size = values.shape[-1]
    place = torch.arange(size, device=values.device)
    ahead = values[..., None, :] > values[..., :, None]
    ahead = ahead | ((values[..., None, :] == values[..., :, None]) & (place[None, :] < place[:, None]))
    return ahead.sum(-1) < count


class Experts(nn.Module):
    """Routed and shared experts. No token is dropped."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config)
        self.gate_proj = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.up_proj = nn.Parameter(torch.randn(experts, width, hidden) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.zeros(experts, hidden, width))
        self.shared_experts = FeedForward(hidden, width * config.n_shared_experts)
        self.fp8 = False

    def routed_weights(self) -> list[nn.Parameter]:
        return [self.gate_proj, self.up_proj, self.down_proj]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, hidden]. Returns the sum of the chosen and shared experts, and the load [experts]."""
        weights, load = self.gate(x)
        routed = self.all_experts(x, weights) if x.is_cuda else self.chosen_experts(x, weights)
        return routed + self.shared_experts(x), load

    def all_experts(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every expert computes every token, and experts that a token did not choose have weight 0.

        With a handful of small experts two large products are faster on a GPU than sorting tokens.
        """
        gate = linear(x, self.gate_proj.flatten(0, 1), fp8=self.fp8)
        up = linear(x, self.up_proj.flatten(0, 1), fp8=self.fp8)
        inner = (functional.silu(gate) * up).unflatten(-1, (len(self.gate_proj), -1))
        inner = (inner * weights[..., None].to(x.dtype)).flatten(-2)
        # A token's weight for an expert scales whole groups of 128. Quantizing after that equals quantizing before.
        return linear(inner, self.down_proj.transpose(0, 1).flatten(1), fp8=self.fp8)

    def chosen_experts(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The same, by the chosen experts alone: with tokens sorted by expert it takes a processor 40% of the time."""
        each = self.gate.config.num_experts_per_tok
        weight, expert = weights.topk(each, dim=-1)
        order = expert.flatten().argsort(stable=True)
        sizes = expert.flatten().bincount(minlength=len(self.gate_proj)).tolist()
        inputs = x[order // each].split(sizes)
        scales = weight.flatten()[order, None].to(x.dtype).split(sizes)
        outputs = [
            linear(
                functional.silu(linear(tokens, gate, fp8=self.fp8)) * linear(tokens, up, fp8=self.fp8) * scale,
                down,
                fp8=self.fp8,
            )
            for tokens, scale, gate, up, down in zip(inputs, scales, *self.routed_weights(), strict=True)
        ]
        return torch.cat(outputs)[order.argsort()].unflatten(0, (-1, each)).sum(1)
