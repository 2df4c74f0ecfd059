"""Attention over selected tokens in plain torch: the definition."""

import torch

from kernels.kv_copy import BLOCK_TOKENS, read_latents
from kernels.mla_decode import DecodePlan
from kernels.top_tokens import NO_TOKEN

# The most numbers of latents that are gathered at a time.
MOST_GATHERED = 1 << 22


def mla_selected(
    query: torch.Tensor,
    pool: torch.Tensor,
    plan: DecodePlan,
    tokens: torch.Tensor,
    value_width: int,
    scale: float,
    kv_scale: float,
) -> torch.Tensor:
    queries, heads, width = query.shape
    out = query.new_empty(queries, heads, value_width)
    slots = slots_of(tokens, plan)
    few = max(MOST_GATHERED // (tokens.shape[1] * width), 1)
    for first in range(0, queries, few):
        some = slice(first, first + few)
        latents = read_latents(pool, slots[some].flatten(), query.dtype, kv_scale).view(len(slots[some]), -1, width)
        scores = (query[some] @ latents.mT).float() * scale
        scores.masked_fill_((tokens[some] == NO_TOKEN).unsqueeze(1), float("-inf"))
        out[some] = torch.softmax(scores, dim=2).to(query.dtype) @ latents[:, :, :value_width]
    return out


def slots_of(tokens: torch.Tensor, plan: DecodePlan) -> torch.Tensor:
    """[queries, count] int64; some slot of the row's first block where no token is selected."""
    table = plan.block_table.repeat_interleave(plan.query_tokens, dim=0)
    places = tokens.clamp(min=0).long()
    return table.gather(1, places // BLOCK_TOKENS).long() * BLOCK_TOKENS + places % BLOCK_TOKENS
