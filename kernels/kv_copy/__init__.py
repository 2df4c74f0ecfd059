"""Reads latents from the paged pool, and (`segment`) copies whole blocks to and from staging.

A slot is the place of one token: block * 64 + offset. A pool has the latents' own dtype, or e4m3 with one scale for all
latents: a latent is `scale` times the stored value, and values beyond e4m3's range are clamped to it.
"""

from collections.abc import Sequence

import torch

from kernels.act_quant import GROUP, Quantized
from kernels.kv_copy import reference

BLOCK_TOKENS = reference.BLOCK_TOKENS
COMPRESSED = reference.COMPRESSED


def slot_runs(block_ids: Sequence[int], tokens: int) -> list[slice]:
    """The slots of the first `tokens` tokens of these blocks as the fewest contiguous slices, in order."""
    assert 0 <= tokens <= len(block_ids) * BLOCK_TOKENS
    return reference.slot_runs(block_ids, tokens)


def read_latents(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The latents at these slots, in order: a new [tokens, width] of `dtype`.

    pool: [blocks, 64, width] contiguous, of `dtype`, whose latents are returned as they are stored (`scale` is 1), or
    e4m3. Latents of other pools are returned in e4m3 too, with a scale of 1. slots: [tokens] int64.
    """
    assert pool.is_contiguous()
    assert pool.dtype == COMPRESSED or (dtype in (pool.dtype, COMPRESSED) and scale == 1.0)
    if pool.is_cuda:
        from kernels.kv_copy import triton

        return triton.read_latents(pool, slots, dtype, scale)
    return reference.read_latents(pool, slots, dtype, scale)


def read_quantized(
    pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float = 1.0, *, width: int, powers: bool = False
) -> tuple[Quantized, torch.Tensor]:
    """The latents at these slots, in order: the first `width` numbers of each in e4m3, and [tokens, rest] the others as
    `read_latents` returns them.

    Numbers of an e4m3 pool stay as they are stored: their groups all have the pool's scale, be it a power of two or
    not. Others are quantized as by `kernels.act_quant.quantize`, with scales that are powers of two if `powers`. Pool
    and slots are those of `read_latents`; width: a multiple of 128.
    """
    assert pool.is_contiguous() and width % GROUP == 0 and width < pool.shape[2]
    assert pool.dtype == COMPRESSED or (pool.dtype == dtype and scale == 1.0)
    if pool.is_cuda:
        from kernels.kv_copy import triton

        return triton.read_quantized(pool, slots, dtype, scale, width, powers)
    return reference.read_quantized(pool, slots, dtype, scale, width, powers)


def place_latents(latents: torch.Tensor, order: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Write latent `order[i]` to `slots[i]`, for each i.

    latents: [any, width] contiguous, as `pool` stores them; order, slots: [tokens] int64, the slots distinct.
    """
    assert latents.is_contiguous() and pool.is_contiguous() and latents.dtype == pool.dtype
    assert latents.shape[1] == pool.shape[2] and order.shape == slots.shape
    if pool.is_cuda:
        from kernels.kv_copy import triton

        triton.place_latents(latents, order, pool, slots)
    else:
        reference.place_latents(latents, order, pool, slots)
