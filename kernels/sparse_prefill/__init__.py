"""Attention over a long prompt that leaves out blocks of keys: the vertical and slash lines of each head.

Jiang et al., "MInference 1.0" (NeurIPS 2024), section 3: in long prompts most of a head's attention lies on a few keys
that all queries see (vertical lines: the first tokens, headings, what was asked for) and at a few distances behind the
query (slashes: diagonals of the scores). The last queries show where. Lines are rounded to blocks of 64 keys by 128
queries, so that a block is a dense product. In place of MInference's fixed number of lines, found per head by a search,
each head takes as many as hold a given share of the last queries' mass, as FlexPrefill does (Lai et al., ICLR 2025).
"""

import torch

from kernels.sparse_prefill import reference
from kernels.sparse_prefill.blocks import TILE_QUERIES, kept_blocks
from kernels.sparse_prefill.line_masses import BLOCK_KEYS
from kernels.sparse_prefill.selection import (
    LAST_QUERIES,
    Selection,
    attention_log_sums,
    select_lines,
)

__all__ = [
    "BLOCK_KEYS",
    "LAST_QUERIES",
    "TILE_QUERIES",
    "Selection",
    "attention_log_sums",
    "kept_blocks",
    "select_lines",
    "sparse_prefill",
]


def sparse_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    selection: Selection,
    *,
    first_query: int,
    first_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`mla_prefill` of one prompt, over the selected blocks of keys alone.

    query, own, shared and value: as there, queries at the prompt's positions from `first_query` on, keys and values at
    those from `first_key` on, a multiple of 64. A query sees the keys up to its own position in the blocks that
    `selection` keeps for its tile of 128 queries. Returns what `mla_prefill` does, for `merge_attention` with other
    keys of the prompt; a query that sees none of these has zeros and a log-sum of minus infinity. With every line
    selected this is causal attention.
    """
    assert own.shape[:2] == value.shape[:2] and shared.shape[0] == own.shape[0]
    assert query.shape[1:] == (own.shape[1], own.shape[2] + shared.shape[1]) and selection.heads == query.shape[1]
    assert query.dtype == own.dtype == shared.dtype == value.dtype
    assert first_key % BLOCK_KEYS == 0
    assert first_key + own.shape[0] <= selection.blocks * BLOCK_KEYS
    spans = query.shape[0], own.shape[0]
    offset = first_query - first_key
    if not query.is_cuda:
        kept = kept_blocks(selection, *spans, first_query=first_query, first_key=first_key)
        return reference.sparse_prefill(query, own, shared, value, kept, offset, scale)
    # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
    from kernels.mla_prefill.hopper_inputs import takes
    from kernels.sparse_prefill import bf16, triton, triton_blocks

    lists = triton_blocks.list_blocks(selection, *spans, first_query=first_query, first_key=first_key)
    attend = bf16.sparse_prefill if takes(query, own, shared, value) else triton.sparse_prefill
    return attend(query, own, shared, value, lists, offset, scale)
