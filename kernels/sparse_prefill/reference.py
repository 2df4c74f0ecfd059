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
    out: torch.Tensor,
    log_sum: torch.Tensor,
    first_query: int,
    scale: float,
) -> None:
    """kept: [heads, tiles, blocks] bool; first_query: how many of the keys lie before the first query."""
    # In float32: products in bfloat16 take long on a CPU without instructions for them.
    key, queries = join_keys(own, shared).float(), query.float()
    keys, values = key.permute(1, 2, 0), value.float().transpose(0, 1)
    for tile, start in enumerate(range(0, query.shape[0], TILE_QUERIES)):
        rows = slice(start, min(start + TILE_QUERIES, query.shape[0]))
        seen = min(first_query + rows.stop, key.shape[0])
        scores = torch.bmm(queries[rows].transpose(0, 1), keys[:, :, :seen]).mul_(scale)
        positions = torch.arange(first_query + rows.start, first_query + rows.stop, device=query.device).unsqueeze(1)
        later = torch.arange(seen, device=query.device) > positions
        dropped = ~kept[:, tile].repeat_interleave(BLOCK_KEYS, 1)[:, None, :seen]
        scores.masked_fill_(later | dropped, float("-inf"))
        log_sum[:, rows] = sums = scores.logsumexp(2)
        weights = (scores - sums.unsqueeze(2)).exp_().nan_to_num_(0)
        out[rows] = torch.bmm(weights, values[:, :seen]).transpose(0, 1)
