"""The definition."""

import torch


def route(
    choices: torch.Tensor, counted: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    chosen.index_add_(0, choices.flatten(), counted.unsqueeze(1).expand_as(choices).flatten())
    turns = torch.arange(len(choices), device=choices.device).unsqueeze(1) % copies[choices]
    return slots[choices, turns]
