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
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    key = join_keys(own, shared)
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
    log_sum = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    for queries, keys in plan.ranges():
        _attend(query[queries], key[keys], value[keys], plan.causal, scale, out[queries], log_sum[:, queries])
    return out, log_sum


def join_keys(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """own: [keys, heads, nope]; shared: [keys, rope]. Returns [keys, heads, nope + rope]."""
    return torch.cat([own, shared.unsqueeze(1).expand(-1, own.shape[1], -1)], dim=2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    out: torch.Tensor,
    log_sum: torch.Tensor,
) -> None:
    queries, heads, _ = query.shape
    cached = key.shape[0] - queries
    keys, values = key.permute(1, 2, 0), value.transpose(0, 1)
    tile = max(min(QUERY_TILE, TILE_SCORES // max(heads * key.shape[0], 1)), 1)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = cached + stop if causal else key.shape[0]
        scores = torch.bmm(query[start:stop].transpose(0, 1), keys[:, :, :seen]).mul_(scale).float()
        if causal:
            later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu(1)
            scores[:, :, cached + start :].masked_fill_(later, float("-inf"))
        weights = torch.softmax(scores, dim=2)
        # The largest score's weight is 1 / sum(exp(score - largest)). On CPU softmax is seven times as fast as exp_.
        log_sum[:, start:stop] = scores.amax(dim=2) - weights.amax(dim=2).log_()
        out[start:stop] = torch.bmm(weights.to(query.dtype), values[:, :seen]).transpose(0, 1)


def merge_attention(
    out: torch.Tensor, log_sum: torch.Tensor, other_out: torch.Tensor, other_log_sum: torch.Tensor
) -> None:
    share = torch.sigmoid(other_log_sum - log_sum).t().unsqueeze(2)
    out.copy_(torch.lerp(out.float(), other_out.float(), share))
    torch.logaddexp(log_sum, other_log_sum, out=log_sum)
