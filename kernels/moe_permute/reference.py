"""Permutation of tokens by expert in plain torch, the definition."""

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Expanded:
    """Rows ordered by expert, where each expert's rows end, and the rows of each token."""

    # [tokens * k, width]
    rows: torch.Tensor
    # [experts] int32
    ends: torch.Tensor
    # [tokens, k] int64
    positions: torch.Tensor


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int) -> Expanded:
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return Expanded(
        rows=x.index_select(0, order // experts.shape[1]),
        ends=chosen.bincount(minlength=expert_count).cumsum(0, dtype=torch.int32),
        positions=positions.view_as(experts),
    )


def combine(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return functional.embedding_bag(positions, rows, per_sample_weights=weights.to(rows.dtype), mode="sum")
