"""Attention over a long prompt that leaves out blocks of keys: the vertical and slash lines of each head.

Jiang et al., "MInference 1.0" (NeurIPS 2024), section 3: in long prompts most of a head's attention lies on a few keys
that all queries see (vertical lines: the first tokens, headings, what was asked for) and at a few distances from the
query (slashes: diagonals of the scores). The last queries show where. Lines are rounded to blocks of 64 keys by 128
queries, so that a block is a dense product. In place of MInference's fixed number of lines, found per head by a search,
each head takes as many as hold a given share of the last queries' mass, as FlexPrefill does (Lai et al., ICLR 2025).
"""

import torch

from kernels.act_quant import QuantizedRows, quantize_into
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
    "sparse_prefill_and_quantize",
]


def sparse_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    selection: Selection,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    *,
    first_query: int,
    scale: float,
) -> None:
    """`mla_prefill` of one prompt, over the selected blocks of keys alone.

    query, own, shared and value: as there, queries at the prompt's positions from `first_query` on, keys and values at
    those from 0 on. A query sees the keys up to its own position in the blocks that `selection` keeps for its tile of
    128 queries. log_sum: [heads, queries] float32 gets the natural log of sum(exp(scale * query . key)). It may be some
    heads of a larger one, and so may `out`. A query none of whose keys are selected has zeros and a log-sum of minus
    infinity. With every line selected this is `mla_prefill`.
    """
    _check(query, own, shared, value, selection)
    assert out.shape == (*query.shape[:2], value.shape[2]) and log_sum.shape == (query.shape[1], query.shape[0])
    assert out.dtype == query.dtype and out.stride()[1:] == (value.shape[2], 1)
    assert log_sum.dtype == torch.float32 and log_sum.is_contiguous()
    spans = query.shape[0], own.shape[0], first_query
    if not query.is_cuda:
        kept = kept_blocks(selection, *spans)
        reference.sparse_prefill(query, own, shared, value, kept, out, log_sum, first_query, scale)
        return
    # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
    from kernels.mla_prefill.hopper_inputs import takes
    from kernels.sparse_prefill import bf16, triton, triton_blocks

    lists = triton_blocks.list_blocks(selection, *spans)
    attend = bf16.sparse_prefill if takes(query, own, shared, value) else triton.sparse_prefill
    attend(query, own, shared, value, lists, out, log_sum, first_query, scale)


def sparse_prefill_and_quantize(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    selection: Selection,
    out: QuantizedRows,
    *,
    first_query: int,
    scale: float,
) -> None:
    """`sparse_prefill`, whose outputs are quantized for the product that reads them.

    out: [queries, heads * 128], which the outputs of all heads fill; it may have some groups of larger rows.
    """
    _check(query, own, shared, value, selection)
    (queries, heads, _), width = query.shape, value.shape[2]
    assert out.values.shape == (queries, heads * width)
    if query.is_cuda:
        from kernels.mla_prefill.hopper_inputs import takes
        from kernels.sparse_prefill import bf16, triton_blocks

        if takes(query, own, shared, value):
            lists = triton_blocks.list_blocks(selection, queries, own.shape[0], first_query)
            bf16.sparse_prefill_and_quantize(query, own, shared, value, lists, out, first_query, scale)
            return
    values = query.new_empty(queries, heads, width)
    log_sum = query.new_empty(heads, queries, dtype=torch.float32)
    sparse_prefill(query, own, shared, value, selection, values, log_sum, first_query=first_query, scale=scale)
    quantize_into(values.flatten(1), out)


def _check(
    query: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, value: torch.Tensor, selection: Selection
) -> None:
    assert own.shape[:2] == value.shape[:2] and shared.shape[0] == own.shape[0]
    assert query.shape[1:] == (own.shape[1], own.shape[2] + shared.shape[1]) and selection.heads == query.shape[1]
    assert query.dtype == own.dtype == shared.dtype == value.dtype
    assert own.shape[0] <= selection.blocks * BLOCK_KEYS
