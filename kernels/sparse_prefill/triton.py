"""Attention over kept blocks in Triton."""

import math

import torch
import triton
import triton.language as tl

from kernels.mla_prefill.triton import attend_to_block
from kernels.sparse_prefill.blocks import TILE_QUERIES
from kernels.sparse_prefill.line_masses import BLOCK_KEYS
from kernels.sparse_prefill.triton_blocks import BlockLists


# A program attends with 128 queries of one head to the blocks of 64 keys in its list: first, with a mask, those that
# not all its queries see whole, then the others. Programs of later queries, which tend to have more, start first.
# 2 * (key width + value width) FLOPs a score. Programs of a head share most blocks, which come from the cache.
@triton.jit(do_not_specialize=["queries", "keys", "offset", "tiles", "blocks"])
def _attend(
    query, key, value, out, log_sums, lists, counts, query_row, query_head, key_row, key_head, value_row, value_head,
    out_row, out_head, queries, keys, offset, tiles, blocks, scale,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr, PADDED_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    tile = tiles - 1 - tl.program_id(0)
    own = tile * QUERIES + tl.arange(0, QUERIES)
    known = own < queries
    first, rest, column = tl.arange(0, FIRST), FIRST + tl.arange(0, REST), tl.arange(0, PADDED_VALUE)
    source = query + own[:, None].to(tl.int64) * query_row + head * query_head
    query_first = tl.load(source + first[None, :], mask=known[:, None] & (first < WIDTH)[None, :], other=0.0)
    query_rest = tl.load(source + rest[None, :], mask=known[:, None] & (rest < WIDTH)[None, :], other=0.0)
    key += head * key_head
    value += head * value_head
    largest = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sum_values = tl.zeros([QUERIES, PADDED_VALUE], tl.float32)
    last_key = offset + own
    place = (head * tiles + tile).to(tl.int64)
    lists += place * blocks
    masked, count = tl.load(counts + place * 2), tl.load(counts + place * 2 + 1)
    for index in range(masked):
        largest, total, sum_values = attend_to_block(
            query_first, query_rest, key, value, key_row, value_row, tl.load(lists + index).to(tl.int32) * KEYS, keys,
            last_key, first, rest, column, scale, largest, total, sum_values, True, WIDTH, VALUE, KEYS,
        )  # fmt: skip
    for index in range(masked, count):
        largest, total, sum_values = attend_to_block(
            query_first, query_rest, key, value, key_row, value_row, tl.load(lists + index).to(tl.int32) * KEYS, keys,
            last_key, first, rest, column, scale, largest, total, sum_values, False, WIDTH, VALUE, KEYS,
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: BlockLists, offset: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    queries, heads, width = query.shape
    keys, value_width, device = key.shape[0], value.shape[2], query.device
    out = torch.empty(queries, heads, value_width, dtype=query.dtype, device=device)
    log_sums = torch.empty(heads, queries, dtype=torch.float32, device=device)
    if not queries:
        return out, log_sums
    tiles, blocks = kept.lists.shape[1:]
    # Tiles of tl.dot are powers of two: a width of 192 is split into 128 and 64.
    first = max(1 << (width.bit_length() - 1), 16)
    rest = max(triton.next_power_of_2(max(width - first, 1)), 16)
    _attend[(tiles, heads)](
        query, key, value, out, log_sums, kept.lists, kept.counts,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        out.stride(0), out.stride(1), queries, keys, offset, tiles, blocks, scale * math.log2(math.e),
        width, first, rest, value_width, max(triton.next_power_of_2(value_width), 16), TILE_QUERIES, BLOCK_KEYS,
        # In float32 a second stage does not fit.
        num_warps=8, num_stages=1 if query.dtype == torch.float32 else 3,
    )  # fmt: skip
    return out, log_sums
