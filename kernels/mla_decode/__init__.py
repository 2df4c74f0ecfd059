"""Decode attention of MLA in its absorbed form: all heads share one latent key, whose head is also the value.

DeepSeek-V2 (2024), section 2.1.2: with the key's up-projection absorbed into the query and the value's into the output,
attention is multi-query over the cached latent.
"""

from collections.abc import Sequence

import torch

from kernels.mla_decode import reference
from kernels.mla_decode.reference import DecodePlan


def plan_decode(runs: Sequence[Sequence[slice]], query_tokens: int = 1) -> DecodePlan:
    """What all layers of one step share: where each row's latents lie. Made once a step.

    runs: per row, `kv_copy.slot_runs` of its whole context, the row's own query tokens included; query_tokens: queries
    of every row, the last ones of its context.
    """
    assert query_tokens >= 1
    assert all(sum(run.stop - run.start for run in row) >= query_tokens for row in runs)
    return DecodePlan(runs=tuple(map(tuple, runs)), query_tokens=query_tokens)


def mla_decode(
    query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, *, value_width: int, scale: float
) -> torch.Tensor:
    """softmax(scale * query . latent) @ latent[:value_width], causal among the row's own queries, in the query's dtype.

    query: [rows * query_tokens, heads, width], row by row; pool: [blocks, 64, width] contiguous, one layer's, of the
    query's dtype or e4m3, with the queries' own latents already written; value_width: 512 of DeepSeek's 576. Returns
    [rows * query_tokens, heads, value_width]; no rows give no rows. Backend: the reference.
    """
    assert query.shape[0] == len(plan.runs) * plan.query_tokens and query.is_contiguous()
    assert query.shape[2] == pool.shape[2] and pool.is_contiguous()
    assert pool.dtype in (query.dtype, torch.float8_e4m3fn)
    return reference.mla_decode(query, pool, plan, value_width, scale)
