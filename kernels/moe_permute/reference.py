"""Permutation of tokens by expert in plain torch, the definition."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Expanded:
    rows: torch.Tensor
    counts: list[int]
    order: torch.Tensor


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int) -> Expanded:
    chosen = experts.view(-1)
    order = chosen.argsort(stable=True)
    rows = x.index_select(0, order // experts.shape[1])
    return Expanded(rows=rows, counts=chosen.bincount(minlength=expert_count).tolist(), order=order)


def combine(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    tokens, k = weights.shape
    by_token = torch.empty_like(rows).index_copy_(0, order, rows).view(tokens, k, rows.shape[1])
    return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_token).squeeze(1)
