"""Absorbed decode attention in Triton: any widths and head counts, bf16 or e4m3 pools."""

import math

import torch
import triton
import triton.language as tl

from kernels.hopper import shared_bytes
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode.plan import DecodePlan
from kernels.tile_sizes import cdiv, next_power_of_2

ROW_TILE = 64
# The row tile of cards without room for 64 rows of queries and two blocks of latents, which take 152 KB for DeepSeek's
# widths (216 KB on Hopper). 32 rows take 74 KB.
SMALL_ROW_TILE, ROOM_BYTES = 32, 160 << 10
# Contexts are divided into splits until there are this many programs for each multiprocessor.
PROGRAMS_PER_PROCESSOR = 2
MAX_SPLITS = 32


# A program computes 64 rows (queries x heads) of one request over one split of its blocks, 64 tokens at a time. It
# loads a latent once for scores and values. Reads 2 bytes for each value of a latent and row tile; does 2 * (width +
# value width) FLOPs for each token and row.
@triton.jit
def _decode(
    query, pool, block_table, lengths, out, log_sums, table_stride, heads, rows, splits, scale, kv_scale,
    QUERY_TOKENS: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, PADDED_VALUE: tl.constexpr,
    PADDED_REST: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    split = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    value_column = tl.arange(0, PADDED_VALUE)
    rest_column = VALUE + tl.arange(0, PADDED_REST)
    source = query + (request.to(tl.int64) * rows + row[:, None]) * WIDTH
    known = row < rows
    query_values = tl.load(
        source + value_column[None, :], mask=known[:, None] & (value_column < VALUE)[None, :], other=0.0
    )
    query_rest = tl.load(source + rest_column[None, :], mask=known[:, None] & (rest_column < WIDTH)[None, :], other=0.0)
    length = tl.load(lengths + request)
    seen = length - QUERY_TOKENS + 1 + row // heads
    per_split = tl.cdiv(tl.cdiv(length, TOKENS), splits) * TOKENS
    first = split * per_split
    largest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_values = tl.zeros([ROWS, PADDED_VALUE], tl.float32)
    for start in range(first, tl.minimum(first + per_split, length), TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < length
        block = tl.load(block_table + request.to(tl.int64) * table_stride + token // BLOCK, mask=inside, other=0)
        latent = pool + (block.to(tl.int64) * BLOCK + token % BLOCK)[:, None] * WIDTH
        values = tl.load(
            latent + value_column[None, :], mask=inside[:, None] & (value_column < VALUE)[None, :], other=0.0
        ).to(query_values.dtype)
        rest = tl.load(
            latent + rest_column[None, :], mask=inside[:, None] & (rest_column < WIDTH)[None, :], other=0.0
        ).to(query_values.dtype)
        scores = tl.dot(query_values, tl.trans(values), input_precision="ieee")
        scores = (scores + tl.dot(query_rest, tl.trans(rest), input_precision="ieee")) * scale
        scores = tl.where(token[None, :] < seen[:, None], scores, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(scores, axis=1))
        alpha = tl.exp2(before - largest)
        weights = tl.exp2(scores - largest[:, None])
        total = total * alpha + tl.sum(weights, axis=1)
        sum_values = sum_values * alpha[:, None]
        sum_values = tl.dot(weights.to(values.dtype), values, sum_values, input_precision="ieee")
    target = (request.to(tl.int64) * rows + row) * splits + split
    sum_values = sum_values * (kv_scale / tl.maximum(total, 1e-30))[:, None]
    tl.store(
        out + target[:, None] * VALUE + value_column[None, :], sum_values.to(out.dtype.element_ty),
        mask=known[:, None] & (value_column < VALUE)[None, :],
    )  # fmt: skip
    tl.store(log_sums + target, tl.where(total > 0, largest + tl.log2(tl.maximum(total, 1e-30)), -1e30), mask=known)


# A program combines the splits of one row. Reads 4 bytes for each value and split, writes 2.
@triton.jit
def _combine(
    parts, log_sums, out, splits, VALUE: tl.constexpr, PADDED_VALUE: tl.constexpr, PADDED_SPLITS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, PADDED_SPLITS)
    column = tl.arange(0, PADDED_VALUE)
    inside = split < splits
    log_sum = tl.load(log_sums + row * splits + split, mask=inside, other=float("-inf"))
    weight = tl.exp2(log_sum - tl.max(log_sum, axis=0))
    values = tl.load(
        parts + (row * splits + split)[:, None] * VALUE + column[None, :],
        mask=inside[:, None] & (column < VALUE)[None, :], other=0.0,
    )  # fmt: skip
    joined = tl.sum(values * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + row * VALUE + column, joined.to(out.dtype.element_ty), mask=column < VALUE)


def mla_decode(
    query: torch.Tensor,
    pool: torch.Tensor,
    plan: DecodePlan,
    value_width: int,
    scale: float,
    kv_scale: float,
    processors: int,
) -> torch.Tensor:
    tokens, heads, width = query.shape
    out = torch.empty(tokens, heads, value_width, dtype=query.dtype, device=query.device)
    if not tokens:
        return out
    rows = plan.query_tokens * heads
    # float32 takes twice the shared memory.
    wide = query.dtype == torch.float32
    most = ROW_TILE if shared_bytes(query.device) >= ROOM_BYTES else SMALL_ROW_TILE
    row_tile = 16 if wide else max(min(most, next_power_of_2(rows)), 16)
    row_tiles = cdiv(rows, row_tile)
    splits = _splits(plan.rows * row_tiles, plan.block_table.shape[1], processors)
    parts = out if splits == 1 else torch.empty(tokens, heads, splits, value_width, device=query.device)
    log_sums = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query.device)
    padded = max(next_power_of_2(value_width), 16)
    _decode[(plan.rows, row_tiles, splits)](
        query, pool, plan.block_table, plan.lengths, parts, log_sums, plan.block_table.stride(0), heads, rows, splits,
        scale * kv_scale * math.log2(math.e), kv_scale,
        plan.query_tokens, value_width, width, padded, max(next_power_of_2(width - value_width), 16),
        row_tile, 16 if wide else 64 if row_tile == ROW_TILE else 32, BLOCK_TOKENS,
        num_warps=8 if row_tile == ROW_TILE else 4, num_stages=1 if wide else 2,
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens * heads,)](
            parts, log_sums, out, splits, value_width, padded, next_power_of_2(splits), num_warps=4
        )
    return out


def _splits(programs: int, blocks: int, processors: int) -> int:
    """Splits of each context. They do not depend on its length, so that a captured graph fits any length."""
    wanted = PROGRAMS_PER_PROCESSOR * processors // programs
    return max(min(wanted, blocks, MAX_SPLITS), 1)
