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
    pool.view(-1, pool.shape[2]).index_copy_(0, slots, latents)


def read_latents(pool: torch.Tensor, runs: Sequence[slice]) -> torch.Tensor:
    flat = pool.view(-1, pool.shape[2])
    return flat[runs[0]] if len(runs) == 1 else torch.cat([flat[run] for run in runs])
