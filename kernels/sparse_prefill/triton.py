"""Attention over kept blocks in Triton."""

import math

import torch
import triton
import triton.language as tl

from kernels.hopper import shared_bytes
from kernels.mla_prefill.triton import attend_to_block, choose_tiling, load_queries, padded_widths
from kernels.sparse_prefill.blocks import TILE_QUERIES
from kernels.sparse_prefill.line_masses import BLOCK_KEYS
from kernels.sparse_prefill.triton_blocks import BlockLists


# A program attends with 128 queries of one head to the blocks of 64 keys in its list: first, with a mask, those that
# not all its queries see whole, then the others. Programs of later queries, which tend to have more, start first.
# 2 * (key width + value width) FLOPs a score. Programs of a head share most blocks, which come from the cache.
@triton.jit(do_not_specialize=["queries", "keys", "first_query", "tiles", "blocks"])
def _attend(
    query, nope, rope, value, out, log_sums, lists, counts, query_row, query_head, nope_row, nope_head, rope_row,
    value_row, value_head, out_row, out_head, queries, keys, first_query, tiles, blocks, scale,
    NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr, PADDED_NOPE: tl.constexpr, PADDED_ROPE: tl.constexpr,
    PADDED_VALUE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tile = tiles - 1 - tl.program_id(0)
    own = tile * QUERIES + tl.arange(0, QUERIES)
    known = own < queries
    column = tl.arange(0, PADDED_VALUE)
    query += own[:, None].to(tl.int64) * query_row + head * query_head
    query_nope, query_rope = load_queries(query, known, NOPE, ROPE, PADDED_NOPE, PADDED_ROPE)
    nope += head * nope_head
    value += head * value_head
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sum_values = tl.zeros([QUERIES, PADDED_VALUE], tl.float32)
    last_key = first_query + own
    place = (head * tiles + tile).to(tl.int64)
    lists += place * blocks
    masked, count = tl.load(counts + place * 2), tl.load(counts + place * 2 + 1)
    for index in range(masked):
        largest, total, sum_values = attend_to_block(
            query_nope, query_rope, nope, rope, value, nope_row, rope_row, value_row,
            tl.load(lists + index).to(tl.int32) * KEYS, keys, last_key, column, scale, largest, total, sum_values,
            True, NOPE, ROPE, VALUE, KEYS,
        )  # fmt: skip
    for index in range(masked, count):
        largest, total, sum_values = attend_to_block(
            query_nope, query_rope, nope, rope, value, nope_row, rope_row, value_row,
            tl.load(lists + index).to(tl.int32) * KEYS, keys, last_key, column, scale, largest, total, sum_values,
            False, NOPE, ROPE, VALUE, KEYS,
        )  # fmt: skip
    # A query that saw no key has zeros.
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    target = own.to(tl.int64)
    tl.store(
        out + target[:, None] * out_row + head * out_head + column[None, :],
        (sum_values / divisor[:, None]).to(out.dtype.element_ty), mask=known[:, None] & (column < VALUE)[None, :],
    )  # fmt: skip
    log_sum = tl.where(some, (largest + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
    tl.store(log_sums + head.to(tl.int64) * queries + target, log_sum, mask=known)


def sparse_prefill(
    query: torch.Tensor,
    own: torch.Tensor,
    shared: torch.Tensor,
    value: torch.Tensor,
    kept: BlockLists,
    out: torch.Tensor,
    log_sum: torch.Tensor,
    first_query: int,
    scale: float,
) -> None:
    (queries, heads, _), keys = query.shape, own.shape[0]
    widths = own.shape[2], shared.shape[1], value.shape[2]
    if not queries:
        return
    tiles, blocks = kept.lists.shape[1:]
    padded = tuple(padded_widths(widths))
    tiling = choose_tiling(padded, query.element_size(), shared_bytes(query.device), BLOCK_KEYS)
    _attend[(tiles, heads)](
        query, own, shared, value, out, log_sum, kept.lists, kept.counts,
        query.stride(0), query.stride(1), own.stride(0), own.stride(1), shared.stride(0), value.stride(0),
        value.stride(1), out.stride(0), out.stride(1), queries, keys, first_query, tiles, blocks,
        scale * math.log2(math.e), *widths, *padded, TILE_QUERIES, BLOCK_KEYS,
        num_warps=8, num_stages=tiling.stages,
    )  # fmt: skip
