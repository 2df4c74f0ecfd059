"""Random latents in scattered blocks of a pool that is poisoned everywhere else."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.kv_copy import BLOCK_TOKENS


@dataclass(frozen=True)
class ScatteredContexts:
    # [blocks, 64, width]; NaN outside the contexts.
    pool: torch.Tensor
    # [rows, max_blocks] int32; after a row's own blocks, a block of NaN.
    block_table: torch.Tensor
    lengths: torch.Tensor
    # Per row [length, width].
    contexts: list[torch.Tensor]


def scattered_contexts(lengths: Sequence[int], width: int) -> ScatteredContexts:
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    free = torch.randperm(sum(counts) + 3).tolist()
    pool = torch.full((len(free), BLOCK_TOKENS, width), float("nan"))
    poisoned = free.pop()
    table = torch.full((len(lengths), max(counts, default=0) + 1), poisoned, dtype=torch.int32)
    contexts = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        context = torch.randn(length, width)
        for index, part in enumerate(context.split(BLOCK_TOKENS)):
            pool[blocks[index], : len(part)] = part
        contexts.append(context)
    return ScatteredContexts(pool, table, torch.tensor(lengths, dtype=torch.int32), contexts)
