"""Attention over kept blocks in plain torch: the definition."""

import torch

from kernels.mla_prefill.reference import join_keys
from kernels.sparse_prefill.blocks import TILE_QUERIES
from kernels.sparse_prefill.line_masses import BLOCK_KEYS


def sparse_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    kept: torch.Tensor,
    offset: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """kept: [heads, tiles, blocks] bool; offset: how many positions the first query is behind the first key."""
    key = join_keys(own, shared)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    log_sum = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    keys, values = key.permute(1, 2, 0), value.transpose(0, 1)
    for tile, start in enumerate(range(0, query.shape[0], TILE_QUERIES)):
        rows = slice(start, min(start + TILE_QUERIES, query.shape[0]))
        seen = max(min(offset + rows.stop, key.shape[0]), 0)
        scores = torch.bmm(query[rows].transpose(0, 1), keys[:, :, :seen]).mul_(scale).float()
        positions = torch.arange(offset + rows.start, offset + rows.stop, device=query.device).unsqueeze(1)
        later = torch.arange(seen, device=query.device) > positions
        dropped = ~kept[:, tile].repeat_interleave(BLOCK_KEYS, 1)[:, None, :seen]
        scores.masked_fill_(later | dropped, float("-inf"))
        log_sum[:, rows] = sums = scores.logsumexp(2)
        weights = (scores - sums.unsqueeze(2)).exp_().nan_to_num_(0)
        out[rows] = torch.bmm(weights.to(query.dtype), values[:, :seen]).transpose(0, 1)
    return out, log_sum
