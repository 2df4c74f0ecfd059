"""MLA in its absorbed form over selected tokens: each query attends to a few tokens of its context alone."""

import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan
from kernels.mla_selected import reference


def mla_selected(
    query: torch.Tensor,
    pool: torch.Tensor,
    plan: DecodePlan,
    tokens: torch.Tensor,
    *,
    value_width: int,
    scale: float,
    kv_scale: float = 1.0,
) -> torch.Tensor:
    """softmax(scale * query . latent) @ latent[:value_width] over the selected latents: [queries, heads, value_width]
    of the query's dtype.

    query: [rows * query_tokens, heads, width] contiguous, of the plan's rows, row by row; pool: [blocks, 64, width]
    contiguous, one layer, of the query's dtype or e4m3; tokens: [queries, count] int32, from `top_tokens`: positions in
    a query's row, as many as the plan's query sees up to `count`, and at least one; kv_scale: a latent is kv_scale
    times what the pool holds. For an e4m3 pool of DeepSeek's widths on Hopper the products are in FP8, with each head's
    query quantized.
    """
    assert query.shape[0] == plan.rows * plan.query_tokens == tokens.shape[0] and query.is_contiguous()
    assert query.shape[2] == pool.shape[2] and pool.is_contiguous() and pool.shape[1] == BLOCK_TOKENS
    assert pool.dtype in (query.dtype, torch.float8_e4m3fn) and tokens.dtype == torch.int32 and tokens.is_contiguous()
    if query.is_cuda:
        # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
        from kernels.mla_selected import gathered, triton

        if gathered.takes(query, pool, value_width):
            return gathered.mla_selected(query, pool, plan, tokens, value_width, scale, kv_scale)
        return triton.mla_selected(query, pool, plan, tokens, value_width, scale, kv_scale)
    return reference.mla_selected(query, pool, plan, tokens, value_width, scale, kv_scale)
