"""Copies between tokens and the paged pool in plain torch, the definition."""

from collections.abc import Sequence

import torch

BLOCK_TOKENS = 64


def slot_runs(block_ids: Sequence[int], tokens: int) -> list[slice]:
    runs: list[slice] = []
    for index in range(-(-tokens // BLOCK_TOKENS)):
        start = block_ids[index] * BLOCK_TOKENS
        stop = start + min(BLOCK_TOKENS, tokens - index * BLOCK_TOKENS)
        if runs and runs[-1].stop == start:
            runs[-1] = slice(runs[-1].start, stop)
        else:
            runs.append(slice(start, stop))
    return runs


def write_latents(latents: torch.Tensor, slots: torch.Tensor, pool: torch.Tensor) -> None:
    flat = pool.view(-1, pool.shape[2])
    if pool.dtype == latents.dtype:
        flat.index_copy_(0, slots, latents)
    else:
        limit = torch.finfo(pool.dtype).max
        # As bytes: few operations know one-byte floats.
        compressed = latents.clamp(-limit, limit).to(pool.dtype).view(torch.uint8)
        flat.view(torch.uint8).index_copy_(0, slots, compressed)


def read_latents(pool: torch.Tensor, runs: Sequence[slice], dtype: torch.dtype) -> torch.Tensor:
    flat = pool.view(-1, pool.shape[2])
    parts = [flat[run].to(dtype) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
