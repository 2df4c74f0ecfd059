"""Random index keys in scattered blocks of a pool that is poisoned everywhere else, and queries of their rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.index_keys import IndexQueries, make_queries, pool_shape, read_keys, write_keys
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan, plan_decode

POISON = 255


@dataclass(frozen=True)
class IndexContexts:
    queries: IndexQueries
    pool: torch.Tensor
    plan: DecodePlan
    # Per row the keys as the pool has them, [length, width] float32.
    keys: list[torch.Tensor]


def index_contexts(
    lengths: Sequence[int],
    query_tokens: int,
    heads: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> IndexContexts:
    """lengths: of the rows' contexts, their `query_tokens` queries included; dtype: in which keys are kept."""
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    free = torch.randperm(sum(counts) + 3).tolist()
    shape, stored = pool_shape(width, dtype)
    size = len(free) * shape[0] * shape[1] * stored.itemsize
    pool = torch.full((size,), POISON, dtype=torch.uint8, device=device).view(stored).view(len(free), *shape)
    table = torch.full((len(lengths), max(counts, default=0) + 1), free.pop(), dtype=torch.int32)
    computed = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    keys = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)])
        table[row, :count] = blocks
        place = torch.arange(length)
        slots = (blocks[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS).to(device)
        norm, turns = torch.ones(width, device=device), torch.ones(length, 1, dtype=torch.complex64, device=device)
        given = torch.randn(length, width, device=device).to(computed)
        write_keys(given, norm, torch.zeros_like(norm), turns, slots, pool, interleaved=True)
        keys.append(read_keys(pool, slots).float())
    tokens = len(lengths) * query_tokens
    turns = torch.ones(tokens, 1, dtype=torch.complex64, device=device)
    projected = torch.randn(tokens, heads, width, device=device).to(computed)
    weights = torch.randn(1, tokens, heads, device=device)
    queries = make_queries(projected, weights, turns, pool, factor=1.0, interleaved=True)
    sizes = torch.tensor(lengths, dtype=torch.int32)
    return IndexContexts(queries, pool, plan_decode(table.to(device), sizes.to(device), query_tokens), keys)
