"""Attention over prompts in plain torch: the definition.

Up to 256 queries at a time are multiplied by the keys up to their last one only, which skips the upper half of the
scores and bounds the memory of the rest. On a CPU this is faster than torch's own attention, whose fused form requires
values as wide as keys.
"""

import torch

from kernels.mla_prefill.plan import PrefillPlan

QUERY_TILE = 256
# The most scores held at a time, over all heads. Very long contexts get narrower tiles.
TILE_SCORES = 1 << 24


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    scale: float,
    seen: torch.Tensor | None = None,
) -> None:
    """seen: [queries, keys] bool of one prompt, the keys that each query attends to, instead of all up to its own."""
    key = join_keys(own, shared)
    for queries, keys in plan.ranges():
        _attend(query[queries], key[keys], value[keys], scale, out[queries], seen)


def join_keys(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """own: [keys, heads, nope]; shared: [keys, rope]. Returns [keys, heads, nope + rope]."""
    return torch.cat([own, shared.unsqueeze(1).expand(-1, own.shape[1], -1)], dim=2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    chosen: torch.Tensor | None,
) -> None:
    queries, heads, _ = query.shape
    cached = key.shape[0] - queries
    keys, values = key.permute(1, 2, 0), value.transpose(0, 1)
    tile = max(min(QUERY_TILE, TILE_SCORES // max(heads * key.shape[0], 1)), 1)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = cached + stop
        scores = torch.bmm(query[start:stop].transpose(0, 1), keys[:, :, :seen]).mul_(scale).float()
        if chosen is not None:
            scores.masked_fill_(~chosen[start:stop, :seen], float("-inf"))
        else:
            later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu(1)
            scores[:, :, cached + start :].masked_fill_(later, float("-inf"))
        weights = torch.softmax(scores, dim=2)
        out[start:stop] = torch.bmm(weights.to(query.dtype), values[:, :seen]).transpose(0, 1)
