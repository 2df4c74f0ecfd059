"""Tokens to their experts and back: rows sorted by expert, and the weighted sum of what the experts made of them."""

import torch

from kernels.moe_permute import reference
from kernels.moe_permute.reference import Expanded


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int) -> Expanded:
    """Copy each token once per chosen expert, ordered by expert.

    x: [tokens, width]; experts: [tokens, k] int64 below expert_count. The result holds `rows` [tokens * k, width],
    `ends` [expert_count] int32 (where each expert's rows end) and `positions` [tokens, k] int64 (the row of each token
    and chosen expert). No tokens give no rows. Backend: the reference.
    """
    assert experts.shape[0] == x.shape[0] and experts.dtype == torch.int64
    return reference.expand(x, experts, expert_count)


def combine(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each token the sum of its experts' rows, each times its weight.

    rows: [tokens * k, width] in the order of `expand`; positions: [tokens, k] as it gave them; weights: [tokens, k]
    float32. Returns [tokens, width] of the rows' dtype. Backend: the reference.
    """
    assert positions.shape == weights.shape and rows.shape[0] == positions.numel()
    return reference.combine(rows, positions, weights)
