"""The indexer's scores in Triton: of queries that decode, with or without drafts, and of prompts."""

import torch
import triton
import triton.language as tl

from kernels.index_keys import SCALE_BYTES, IndexQueries
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan
from kernels.tile_sizes import cdiv, next_power_of_2

# Queries of a row that read a block of keys together.
QUERIES = 16


# A program scores the 64 keys of one block for up to `together` queries of a row. It loads the keys once, then for each
# query all its heads. Reads (width + 4) * 64 bytes of keys, and width + 4 bytes for each query and head; does 2 * width
# FLOPs for each query, head and key, in bfloat16: values of e4m3 are exact in it.
@triton.jit(do_not_specialize=["table_stride", "width_out", "row_tiles", "query_tokens", "together"])
def _score(
    queries, weights, keys, scales, block_table, lengths, out, table_stride, width_out, row_tiles, query_tokens,
    together, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, BLOCK: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // row_tiles
    first = tl.program_id(0) % row_tiles * together
    start = tl.program_id(1) * BLOCK
    length = tl.load(lengths + row)
    stop = tl.minimum(first + together, query_tokens)
    # The last query of the tile sees this many tokens.
    seen = length - query_tokens + stop
    if start < seen:
        block = tl.load(block_table + row.to(tl.int64) * table_stride + tl.program_id(1)).to(tl.int64)
        token, column, head = tl.arange(0, BLOCK), tl.arange(0, PADDED_WIDTH), tl.arange(0, PADDED_HEADS)
        inside = start + token < seen
        key = tl.load(
            keys + block * BLOCK_STRIDE + token[:, None] * WIDTH + column[None, :],
            mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        if QUANTIZED:
            key = key.to(tl.bfloat16)
            scale = tl.load(scales + block * SCALE_STRIDE + BLOCK * WIDTH // 4 + token, mask=inside, other=0.0)
        known = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
        for index in range(first, stop):
            query = (row.to(tl.int64) * query_tokens + index) * HEADS
            value = tl.load(queries + (query + head)[:, None] * WIDTH + column[None, :], mask=known, other=0.0)
            weight = tl.load(weights + query + head, mask=head < HEADS, other=0.0)
            products = tl.dot(value.to(key.dtype), tl.trans(key), input_precision="ieee")
            score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], axis=0)
            if QUANTIZED:
                score = score * scale
            target = out + (row.to(tl.int64) * query_tokens + index) * width_out + start + token
            tl.store(target, score, mask=inside)


def index_scores(queries: IndexQueries, pool: torch.Tensor, plan: DecodePlan, out: torch.Tensor) -> None:
    tokens, heads, width = queries.values.shape
    if not tokens:
        return
    quantized = pool.dtype == torch.uint8
    keys, scales = (pool.view(torch.float8_e4m3fn), pool.view(torch.float32)) if quantized else (pool, pool)
    together = min(QUERIES, plan.query_tokens)
    row_tiles = cdiv(plan.query_tokens, together)
    _score[(plan.rows * row_tiles, plan.block_table.shape[1])](
        queries.values, queries.weights, keys, scales, plan.block_table, plan.lengths, out,
        plan.block_table.stride(0), out.shape[1], row_tiles, plan.query_tokens, together,
        heads, max(next_power_of_2(heads), 16), width, max(next_power_of_2(width), 16),
        BLOCK_TOKENS * pool.shape[2], BLOCK_TOKENS * (width + SCALE_BYTES) // 4, BLOCK_TOKENS, quantized,
        num_warps=4,
    )  # fmt: skip
