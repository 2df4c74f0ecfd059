"""Tokens to their experts and back: rows by expert, and the weighted sum of what the experts made of them."""

import torch

from kernels.act_quant.quantized import Quantized
from kernels.moe_permute import reference
from kernels.moe_permute.layout import ContiguousLayout, Layout, MaskedLayout
from kernels.moe_permute.reference import Expanded

__all__ = [
    "ContiguousLayout",
    "Expanded",
    "Layout",
    "MaskedLayout",
    "arrange",
    "combine",
    "contiguous_layout",
    "expand",
    "expand_quantized",
    "masked_layout",
]

# Tiles of grouped products must not straddle two experts.
ALIGNMENT = 128
# Up to here an expert's rows fit one tile of a grouped product, and room for all tokens at each expert is small.
MASKED_TOKENS = 128


def expand(x: torch.Tensor, experts: torch.Tensor, expert_count: int) -> Expanded:
    """Copy each token once per chosen expert, ordered by expert.

    x: [tokens, width]; experts: [tokens, k] int64 below expert_count. The result holds `rows` [tokens * k, width],
    `ends` [expert_count] int32 (where each expert's rows end) and `positions` [tokens, k] int64 (the row of each token
    and chosen expert). No tokens give no rows. Backend: the reference.
    """
    assert experts.shape[0] == x.shape[0] and experts.dtype == torch.int64
    return reference.expand(x, experts, expert_count)


def arrange(experts: torch.Tensor, expert_count: int) -> Layout:
    """The layout in which FP8 experts are fastest: masked for up to 128 tokens, contiguous above.

    experts: [tokens, k] int64 below expert_count, distinct within a token.
    """
    if experts.shape[0] <= MASKED_TOKENS:
        return masked_layout(experts, expert_count)
    return contiguous_layout(experts, expert_count)


def contiguous_layout(experts: torch.Tensor, expert_count: int) -> ContiguousLayout:
    """Rows in order of expert, then of token; each expert's are padded to a multiple of 128.

    experts: [tokens, k] int64 below expert_count. There are as many rows as any choice can need, a multiple of 128.
    Backend: the reference.
    """
    assert experts.dim() == 2 and experts.dtype == torch.int64
    choices = experts.numel()
    rows = choices + min(expert_count, choices) * (ALIGNMENT - 1)
    return reference.contiguous_layout(experts, expert_count, ALIGNMENT, rows // ALIGNMENT * ALIGNMENT)


def masked_layout(experts: torch.Tensor, expert_count: int) -> MaskedLayout:
    """For each expert room for every token; an expert's rows are in order of token.

    experts: [tokens, k] int64 below expert_count, distinct within a token. Backend: the reference.
    """
    assert experts.dim() == 2 and experts.dtype == torch.int64
    return reference.masked_layout(experts, expert_count, max(experts.shape[0], 1))


def expand_quantized(x: Quantized, layout: Layout) -> Quantized:
    """Copy each token's values and scales to its rows of the layout.

    x: [tokens, width]. Returns [rows, width] or [experts, capacity, width]; rows that no token has are left as they
    are. Backend: the reference.
    """
    assert x.values.dim() == 2 and x.values.shape[0] == layout.positions.shape[0]
    return reference.expand_quantized(x, layout)


def combine(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
) -> torch.Tensor:
    """For each token the sum of its experts' rows, each times its weight, and of `shared`, in float32.

    rows: [..., width] contiguous, leading dimensions those of the layout; positions: [tokens, k] int64, as `expand` or
    the layout has them; weights: [tokens, k] float32; shared: [tokens, width] of the rows' dtype, what experts that see
    every token made of it. Returns [tokens, width] of the rows' dtype. Backend: the reference.
    """
    assert positions.shape == weights.shape and weights.dtype == torch.float32 and rows.is_contiguous()
    return reference.combine(rows.flatten(0, -2), positions, weights, shared)
