"""Latents in and out of the paged pool. A slot is one token's place: block * 64 + offset.

A pool is of the latents' own dtype, or of e4m3 without a scale: what normalization leaves lies well within its range,
and what does not is clamped to it.
"""

from collections.abc import Sequence

import torch

from kernels.kv_copy import reference

BLOCK_TOKENS = reference.BLOCK_TOKENS
COMPRESSED = torch.float8_e4m3fn


def slot_runs(block_ids: Sequence[int], tokens: int) -> list[slice]:
    """The slots of the first `tokens` tokens of these blocks as the fewest contiguous slices, in order."""
    assert 0 <= tokens <= len(block_ids) * BLOCK_TOKENS
    return reference.slot_runs(block_ids, tokens)


def write_latents(latents: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> None:
    """Store each token's latent at its slot.

    latents: [tokens, width]; slots: [tokens] int64, distinct; pool: [blocks, 64, width] contiguous, one layer's, of the
    latents' dtype or e4m3. No tokens: nothing happens. Backend: the reference.
    """
    assert latents.shape == (slots.shape[0], pool.shape[2]) and pool.dtype in (latents.dtype, COMPRESSED)
    assert pool.shape[1] == BLOCK_TOKENS and pool.is_contiguous()
    reference.write_latents(latents, slots, pool)


def read_latents(pool: torch.Tensor, runs: Sequence[slice], dtype: torch.dtype) -> torch.Tensor:
    """The latents of one request in order: [tokens, width] of `dtype`.

    pool: [blocks, 64, width] contiguous, of `dtype` or e4m3; runs: of `slot_runs`, at least one. A view of the pool
    where the runs are one and nothing is converted. Backend: the reference.
    """
    assert runs and pool.is_contiguous() and pool.dtype in (dtype, COMPRESSED)
    return reference.read_latents(pool, runs, dtype)
