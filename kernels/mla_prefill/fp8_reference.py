"""Attention over prompts in FP8, in plain torch: the definition.

Queries have a scale for each token and head; keys, and values, one for each head and block of 160 keys of a prompt.
Scores are exact products of the rounded queries and keys. A weight is relative to the largest of its row, rounded up to
a power of two, with its block's scale of values in it; then it is rounded to e4m3, 64 times as large. Since references
are powers of two, a kernel may use others: all but the smallest weights round alike. The softmax's denominator is the
sum of the rounded weights, so that outputs are means of values: where one key has all attention, its value is not
scaled.
"""

import math

import torch

from kernels.mla_prefill.plan import PrefillPlan
from kernels.mla_prefill.reference import QUERY_TILE, TILE_SCORES, join_keys
from kernels.mla_prefill.tiles import BLOCK_KEYS

E4M3 = torch.float8_e4m3fn
# The smallest magnitude that a scale stands for. Weights are multiplied by that of values, and must not vanish where
# values are zero.
SMALLEST, SMALLEST_VALUE = 1e-10, 2.0**-5
# Factor of the weights before they are rounded; the largest number of e4m3 is 448.
WEIGHT_SCALE = 64.0


def mla_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    plan: PrefillPlan,
    out: torch.Tensor,
    scale: float,
) -> None:
    key = join_keys(own, shared)
    for queries, keys in plan.ranges():
        _attend(query[queries], key[keys], value[keys], scale, out[queries])


def round_queries(query: torch.Tensor) -> torch.Tensor:
    """[queries, heads, width] in e4m3 with a scale for each token and head, in float32 again."""
    rounded, scales = _quantize(query.float(), (2,))
    return rounded.mul_(scales)


def round_blocks(part: torch.Tensor, smallest: float = SMALLEST) -> tuple[torch.Tensor, torch.Tensor]:
    """part: [keys, heads, width], one prompt's. Returns float32 numbers of e4m3 and their scales, [keys, heads, 1]."""
    blocks = [_quantize(block.float(), (0, 2), smallest) for block in part.split(BLOCK_KEYS)]
    rounded, scales = zip(*blocks, strict=True)
    lengths = [len(block) for block in rounded]
    return torch.cat(rounded), torch.cat([s.expand(n, -1, -1) for s, n in zip(scales, lengths, strict=True)])


def _quantize(
    x: torch.Tensor, together: tuple[int, ...], smallest: float = SMALLEST
) -> tuple[torch.Tensor, torch.Tensor]:
    scales = x.abs().amax(dim=together, keepdim=True).clamp(min=smallest) / torch.finfo(E4M3).max
    return (x / scales).to(E4M3).float(), scales


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    queries, heads, _ = query.shape
    cached = key.shape[0] - queries
    rounded_keys, key_scales = round_blocks(key)
    keys = rounded_keys.mul_(key_scales).permute(1, 2, 0)
    rounded_values, value_scales = round_blocks(value, SMALLEST_VALUE)
    values, value_scales = rounded_values.transpose(0, 1), value_scales.permute(1, 2, 0)
    # The values' scale is in the weights, so the sum of weights is taken without it.
    shift, unscaled = value_scales.log(), value_scales.reciprocal().transpose(1, 2)
    tile = max(min(QUERY_TILE, TILE_SCORES // max(heads * key.shape[0], 1)), 1)
    for start in range(0, queries, tile):
        stop = min(start + tile, queries)
        seen = cached + stop
        scores = torch.bmm(round_queries(query[start:stop]).transpose(0, 1), keys[:, :, :seen]).mul_(scale)
        scores += shift[:, :, :seen]
        later = torch.ones(stop - start, stop - start, dtype=torch.bool, device=query.device).triu(1)
        scores[:, :, cached + start :].masked_fill_(later, float("-inf"))
        largest = scores.amax(dim=2, keepdim=True).div_(math.log(2))
        reference = largest.ceil()
        # The largest score's weight is 1 / sum(exp(score - largest)). On CPU softmax is seven times as fast as exp_.
        weights = torch.softmax(scores, dim=2)
        weights *= (largest - reference).exp2_() / weights.amax(dim=2, keepdim=True)
        rounded = weights.mul_(WEIGHT_SCALE).to(E4M3).float()
        total = torch.bmm(rounded, unscaled[:, :seen])
        out[start:stop] = (torch.bmm(rounded, values[:, :seen]) / total).transpose(0, 1)
