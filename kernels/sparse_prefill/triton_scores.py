"""Scores of a prompt's last queries, in Triton: queries as tiles take them, and the scores of a tile."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.sparse_prefill.line_masses import LARGEST
from kernels.tile_sizes import cdiv, next_power_of_2

# Queries of a head: its rows of a tile of scores. Fewer are padded.
QUERIES = 64
# What products that do not hold their queries take of the width at a time.
STEP = 64


@dataclass(frozen=True, slots=True)
class TileQueries:
    """A prompt's last queries, as tiles of some heads take them."""

    # [heads, QUERIES, width] of the keys' dtype, contiguous: missing heads and queries are zero.
    values: torch.Tensor
    # [heads, QUERIES] float32: what scores are multiplied by, so that they are logarithms to base 2.
    scales: torch.Tensor


# A program takes one query of one head. Reads 2 bytes a value, writes as many or, rounded to e4m3, 1.
@triton.jit(do_not_specialize=["queries", "heads"])
def _take(
    query, values, scales, query_row, query_head, queries, heads, scale, LARGEST: tl.constexpr,
    QUANTIZES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, PADDED)
    there = tl.where((row < queries) & (head < heads), WIDTH, 0)
    source = query + row.to(tl.int64) * query_row + head.to(tl.int64) * query_head
    value = tl.load(source + column, mask=column < there, other=0.0).to(tl.float32)
    if QUANTIZES:
        largest = tl.max(tl.abs(value), axis=0)
        divisor = tl.where(largest > 0, tl.div_rn(largest, LARGEST), 1.0)
        value = tl.minimum(tl.maximum(tl.div_rn(value, divisor), -LARGEST), LARGEST)
        scale *= divisor
    place = head * tl.num_programs(0) + row
    tl.store(values + place.to(tl.int64) * WIDTH + column, value.to(values.dtype.element_ty), mask=column < WIDTH)
    tl.store(scales + place, scale)


def take_queries(query: torch.Tensor, dtype: torch.dtype, scale: float, together: int) -> TileQueries:
    """query: [queries, heads, width]; dtype: the query's, or e4m3; together: how many heads a tile has."""
    queries, heads, width = query.shape
    padded, device = cdiv(heads, together) * together, query.device
    values = torch.empty(padded, QUERIES, width, dtype=dtype, device=device)
    scales = torch.empty(padded, QUERIES, dtype=torch.float32, device=device)
    _take[(QUERIES, padded)](
        query, values, scales, query.stride(0), query.stride(1), queries, heads, scale, LARGEST,
        dtype != query.dtype, width, next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    return TileQueries(values, scales)


# A tile is ROWS rows against KEYS keys. If its queries are held on the chip they are two operands, FIRST and REST wide,
# for as many tiles as a program has. Else FIRST is 0, both are pointers, and queries are read again for each tile, from
# the L2 cache. Keys always are: all programs that share them start together.
@triton.jit
def held_queries(values, row, WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr):
    source = values + row.to(tl.int64)[:, None] * WIDTH
    first, rest = source, source
    if FIRST:
        other = FIRST + tl.arange(0, REST)[None, :]
        first = tl.load(source + tl.arange(0, FIRST)[None, :])
        rest = tl.load(source + other, mask=other < WIDTH, other=0.0)
    return first, rest


@triton.jit
def scores_of(
    first, rest, scales, key, key_row, row, at, queries, keys,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """first, rest: of `held_queries`; row: [ROWS] among all heads' queries; at: the first key."""
    own = at + tl.arange(0, KEYS)
    inside = own < keys
    target = key + own.to(tl.int64)[None, :] * key_row
    scores = tl.zeros([row.shape[0], KEYS], tl.float32)
    if FIRST:
        other = FIRST + tl.arange(0, REST)[:, None]
        right = tl.load(target + tl.arange(0, FIRST)[:, None], mask=inside[None, :], other=0.0)
        last = tl.load(target + other, mask=inside[None, :] & (other < WIDTH), other=0.0)
        scores = tl.dot(rest, last, tl.dot(first, right, scores))
    else:
        for start in range(0, WIDTH, STEP):
            column = start + tl.arange(0, STEP)
            left = tl.load(first + column[None, :], mask=column[None, :] < WIDTH, other=0.0)
            within = inside[None, :] & (column < WIDTH)[:, None]
            right = tl.load(target + column[:, None], mask=within, other=0.0)
            scores = tl.dot(left, right, scores, input_precision="ieee")
    seen = (own[None, :] <= (keys - queries + row % QUERIES)[:, None]) & inside[None, :]
    return tl.where(seen, scores * scales[:, None], float("-inf"))
