"""Routing to copies of experts in plain torch: the definition."""

import torch

from kernels.moe_gate import NO_EXPERT


def route(choices: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    made, experts = choices != NO_EXPERT, choices.clamp(min=0)
    chosen.index_add_(0, experts.flatten(), made.long().flatten())
    turns = torch.arange(len(choices), device=choices.device).unsqueeze(1) % copies[experts]
    return slots[experts, turns].where(made, NO_EXPERT)
