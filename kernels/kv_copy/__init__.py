"""Latents in and out of the paged pool, and whole blocks in and out of staging. A slot is one token's place:
block * 64 + offset.

A pool is of the latents' own dtype, or of e4m3 with one scale for all it holds: a latent is `scale` times what is
stored, and what lies beyond the range is clamped to it.
"""

from collections.abc import Sequence
from types import ModuleType

import torch

from kernels.kv_copy import reference

BLOCK_TOKENS = reference.BLOCK_TOKENS
COMPRESSED = torch.float8_e4m3fn


def slot_runs(block_ids: Sequence[int], tokens: int) -> list[slice]:
    """The slots of the first `tokens` tokens of these blocks as the fewest contiguous slices, in order."""
    assert 0 <= tokens <= len(block_ids) * BLOCK_TOKENS
    return reference.slot_runs(block_ids, tokens)


def read_latents(pool: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """The latents at these slots, in order: a new [tokens, width] of `dtype`.

    pool: [blocks, 64, width] contiguous, of `dtype` (then `scale` is 1) or e4m3; slots: [tokens] int64.
    """
    assert pool.is_contiguous()
    assert pool.dtype == COMPRESSED or (pool.dtype == dtype and scale == 1.0)
    if pool.is_cuda and pool.dtype == COMPRESSED:
        from kernels.kv_copy import triton

        return triton.read_latents(pool, slots, dtype, scale)
    return reference.read_latents(pool, slots, dtype, scale)


def gather_blocks(
    pool: torch.Tensor, first_layer: int, layers: int, blocks: torch.Tensor, staging: torch.Tensor
) -> None:
    """Copy these blocks of `layers` layers from `first_layer` on, layer-major, to the start of `staging`.

    pool: [layers, blocks, 64, width] contiguous; blocks: [count] int32 on the pool's device; staging: [bytes] uint8,
    16-byte aligned. A block's bytes in one layer are a multiple of 8. No blocks or layers: nothing happens.
    """
    assert pool.is_contiguous() and pool.shape[2] == BLOCK_TOKENS and blocks.dtype == torch.int32
    _backend(pool).gather_blocks(pool, first_layer, layers, blocks, staging)


def scatter_blocks(
    staging: torch.Tensor, pool: torch.Tensor, first_layer: int, layers: int, blocks: torch.Tensor
) -> None:
    """The way back: arguments as of `gather_blocks`; the blocks are distinct."""
    assert pool.is_contiguous() and pool.shape[2] == BLOCK_TOKENS and blocks.dtype == torch.int32
    _backend(pool).scatter_blocks(staging, pool, first_layer, layers, blocks)


def _backend(pool: torch.Tensor) -> ModuleType:
    if pool.is_cuda:
        from kernels.kv_copy import triton

        return triton
    return reference
