"""Which keys each query of a prompt attends to, as bits.

A mask is [blocks, rows, 4] int32: bit i % 32 of word i / 32 of block b and row q is key 128 * b + i of query q. Rows
are queries, and after them what fills up their last tile, whose bits say nothing.
"""

import torch

from kernels.mla_prefill.tiles import QUERIES
from kernels.tile_sizes import cdiv

# Keys of a block, and of a word.
BLOCK_KEYS, WORD_KEYS = 128, 32


def empty_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """A mask that is not written yet."""
    shape = cdiv(keys, BLOCK_KEYS), cdiv(queries, QUERIES) * QUERIES, BLOCK_KEYS // WORD_KEYS
    return torch.empty(shape, dtype=torch.int32, device=device)


def causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """A mask with which the queries, the last of `keys` tokens, attend to all that they see."""
    blocks, rows, words = empty_mask(queries, keys, torch.device("meta")).shape
    seen = torch.arange(keys - queries + 1, keys - queries + 1 + rows, device=device).view(1, rows, 1)
    before = torch.arange(0, blocks * BLOCK_KEYS, WORD_KEYS, device=device).view(blocks, 1, words)
    return ((1 << (seen - before).clamp_(0, WORD_KEYS)) - 1).to(torch.int32)


def write_mask(tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Write which keys some queries attend to.

    tokens: [queries, count] int32 contiguous, from `top_tokens`: positions of keys, ascending, then -1; rows: [blocks,
    queries, 4], those of a mask that belong to the queries.
    """
    assert tokens.dtype == rows.dtype == torch.int32 and tokens.is_contiguous()
    assert rows.shape[1] == len(tokens) and rows.stride()[1:] == (rows.shape[2], 1)
    if tokens.is_cuda:
        # Imported here: a machine without a GPU may lack CUDA's bindings.
        from kernels.mla_prefill import mask_words

        if mask_words.takes(tokens):
            mask_words.write_mask(tokens, rows)
            return
    blocks, queries, words = rows.shape
    seen = torch.zeros(queries, blocks * BLOCK_KEYS + 1, dtype=torch.bool, device=tokens.device)
    seen.scatter_(1, tokens.masked_fill(tokens < 0, blocks * BLOCK_KEYS).long(), True)
    bits = torch.ones(1, dtype=torch.int32, device=tokens.device) << _places(tokens.device)
    packed = (seen[:, :-1].view(queries, blocks, words, WORD_KEYS) * bits).sum(3, dtype=torch.int32)
    rows.copy_(packed.transpose(0, 1))


def seen_keys(mask: torch.Tensor, queries: int, keys: int) -> torch.Tensor:
    """[queries, keys] bool: whether a query attends to a key."""
    bits = mask[:, :queries].transpose(0, 1).unsqueeze(3) >> _places(mask.device) & 1
    return bits.flatten(1)[:, :keys].bool()


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(WORD_KEYS, dtype=torch.int32, device=device)
