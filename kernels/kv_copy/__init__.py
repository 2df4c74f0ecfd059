"""Latents in and out of the paged pool. A slot is one token's place: block * 64 + offset."""

from collections.abc import Sequence

import torch

from kernels.kv_copy import reference

BLOCK_TOKENS = reference.BLOCK_TOKENS


def slot_runs(block_ids: Sequence[int], tokens: int) -> list[slice]:
    """The slots of the first `tokens` tokens of these blocks as the fewest contiguous slices, in order."""
    assert 0 <= tokens <= len(block_ids) * BLOCK_TOKENS
    return reference.slot_runs(block_ids, tokens)


def write_latents(latents: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> None:
    """Store each token's latent at its slot.

    latents: [tokens, width] of the pool's dtype; slots: [tokens] int64, distinct; pool: [blocks, 64, width] contiguous,
    one layer's. No tokens: nothing happens. Backend: the reference.
    """
    assert latents.shape == (slots.shape[0], pool.shape[2]) and latents.dtype == pool.dtype
    assert pool.shape[1] == BLOCK_TOKENS and pool.is_contiguous()
    reference.write_latents(latents, slots, pool)


def read_latents(pool: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    """The latents of one request in order: [tokens, width], a view of the pool where the runs are one.

    pool: [blocks, 64, width] contiguous; runs: of `slot_runs`, at least one. Backend: the reference.
    """
    assert runs and pool.is_contiguous()
    return reference.read_latents(pool, runs)
