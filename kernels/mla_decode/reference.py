"""Absorbed decode attention in plain torch: the definition.

Contexts are read in place. A row's latents are a few contiguous runs of the pool, and copying the runs together would
cost more than attending to them one by one.
"""

import torch

from kernels.mla_decode.plan import DecodePlan, context_runs


def mla_decode(
    query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, value_width: int, scale: float, kv_scale: float
) -> torch.Tensor:
    tokens, heads, width = query.shape
    out = query.new_empty(tokens, heads, value_width)
    if not tokens:
        return out
    flat = pool.view(-1, width)
    mask = _causal_mask(plan.query_tokens, heads, query.device)
    queries = (query * (scale * kv_scale)).view(plan.rows, -1, width)
    rows = plan.runs if plan.runs is not None else context_runs(plan.block_table, plan.lengths)
    for row, target, runs in zip(queries, out.view(plan.rows, -1, value_width), rows, strict=True):
        # Converts nothing unless the pool is e4m3.
        _attend(row, [flat[run].to(query.dtype) for run in runs], value_width, mask, target)
    return out if kv_scale == 1.0 else out.mul_(kv_scale)


def _attend(
    query: torch.Tensor, parts: list[torch.Tensor], value_width: int, mask: torch.Tensor | None, out: torch.Tensor
) -> None:
    """query: [query_tokens * heads, width]; parts: [length, width] each; out: [query_tokens * heads, value_width]."""
    scores = [torch.mm(query, part.t()) for part in parts]
    joined = scores[0] if len(parts) == 1 else torch.cat(scores, dim=1)
    if mask is not None:
        joined[:, -mask.shape[1] :] += mask
    # The softmax is in float32 for every dtype.
    weights = torch.softmax(joined, dim=1, dtype=torch.float32).to(query.dtype)
    if len(parts) == 1:
        torch.mm(weights, parts[0][:, :value_width], out=out)
        return
    out.zero_()
    for weight, part in zip(weights.split([len(part) for part in parts], dim=1), parts, strict=True):
        out.addmm_(weight, part[:, :value_width])


def _causal_mask(query_tokens: int, heads: int, device: torch.device) -> torch.Tensor | None:
    """[query_tokens * heads, query_tokens]: a query does not see later queries of its row. One query needs no mask."""
    if query_tokens == 1:
        return None
    square = torch.full((query_tokens, query_tokens), float("-inf"), device=device).triu(1)
    return square.repeat_interleave(heads, dim=0)
