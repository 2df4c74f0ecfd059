"""Causal attention in plain torch, the definition.

Tiling: up to 256 queries at a time see only the keys up to their last one, which skips the upper half of the scores and
bounds the memory that the rest takes. On CPU this is faster than torch's own attention, whose fused form wants values
as wide as keys.
"""

import torch

QUERY_TILE = 256
# Scores held at a time, over all heads; a very long context gets narrower tiles.
TILE_SCORES = 1 << 24


def mla_prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    queries, heads, _ = query.shape
    cached = key.shape[0] - queries
    out = query.new_empty(queries, heads, value.shape[2])
    keys, values = key.permute(1, 2, 0), value.transpose(0, 1)
    tile = max(min(QUERY_TILE, TILE_SCORES // max(heads * key.shape[0], 1)), 1)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        scores = torch.bmm(query[start:stop].transpose(0, 1), keys[:, :, : cached + stop]).mul_(scale)
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu(1)
        scores[:, :, cached + start :].masked_fill_(later, float("-inf"))
        weights = torch.softmax(scores, dim=2, dtype=torch.float32).to(query.dtype)
        out[start:stop] = torch.bmm(weights, values[:, : cached + stop]).transpose(0, 1)
    return out
