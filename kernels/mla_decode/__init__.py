"""Decode attention of MLA in its absorbed form: all heads share one latent key, whose head is also the value.

DeepSeek-V2 (2024), section 2.1.2: with the key's up-projection absorbed into the query and the value's into the output,
attention is multi-query over the cached latent.
"""

import torch

from kernels.hopper import processors
from kernels.mla_decode import flash_mla, reference
from kernels.mla_decode.attended import Attended
from kernels.mla_decode.plan import DecodePlan, plan_decode

__all__ = ["FEW_HEADS", "Attended", "DecodePlan", "mla_decode", "plan_decode"]

# The most heads for which kernels with heads as the narrow side attend: GLM-4.7-Flash's, the most for which they were
# measured.
FEW_HEADS = 20


def mla_decode(
    query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, *, value_width: int, scale: float, kv_scale: float = 1.0
) -> Attended:
    """softmax(scale * query . latent) @ latent[:value_width], causal among the row's own queries, in the query's dtype.

    query: [rows * query_tokens, heads, width] contiguous, row by row; pool: [blocks, 64, width] contiguous, one layer,
    of the query's dtype or e4m3, with the queries' own latents already written; value_width: 512 of DeepSeek's 576;
    kv_scale: a latent is kv_scale times what the pool holds. Returns [rows * query_tokens, heads, value_width], where
    requests that several multiprocessors share may be left in pieces; no rows give no rows. On a GPU this runs our
    kernels, or flash_mla if that works, for a bf16 pool with fewer than 128 heads unless they are at most FEW_HEADS of
    one query. For an e4m3 pool of DeepSeek's widths on Hopper products are in FP8, with each head's query quantized.
    """
    assert query.shape[0] == plan.rows * plan.query_tokens and query.is_contiguous()
    assert query.shape[2] == pool.shape[2] and pool.is_contiguous()
    assert pool.dtype in (query.dtype, torch.float8_e4m3fn)
    if not query.is_cuda:
        return Attended(reference.mla_decode(query, pool, plan, value_width, scale, kv_scale))
    return _on_device(query, pool, plan, value_width, scale, kv_scale)


def _on_device(
    query: torch.Tensor, pool: torch.Tensor, plan: DecodePlan, value_width: int, scale: float, kv_scale: float
) -> Attended:
    # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
    from kernels.mla_decode import bf16, few_heads, few_heads_parts, fp8, triton
    from kernels.mla_decode.parts import HEADS

    if few_heads.takes(query, pool, plan, value_width):
        return few_heads.attend(query, pool, plan, scale)
    if few_heads_parts.takes(query, pool, plan, value_width):
        return few_heads_parts.attend(query, pool, plan, scale)
    packaged = flash_mla.takes(query, pool, value_width)
    # Measured: flash_mla is faster with 16 heads, ours with 128, where it reads every latent once for two row tiles.
    if bf16.takes(query, pool, value_width) and (query.shape[1] >= 2 * HEADS or not packaged):
        return bf16.attend(query, pool, plan, scale)
    if packaged:
        return Attended(flash_mla.mla_decode(query, pool, plan, scale))
    if fp8.takes(query, pool, value_width):
        return fp8.attend(query, pool, plan, scale, kv_scale)
    return Attended(triton.mla_decode(query, pool, plan, value_width, scale, kv_scale, processors(query.device)))
