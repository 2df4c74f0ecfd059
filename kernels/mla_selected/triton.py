"""Attention over selected tokens in Triton: any widths and head counts, bf16 or e4m3 pools, decode and prompts."""

import math

import torch
import triton
import triton.language as tl

from kernels.hopper import shared_bytes
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode import DecodePlan
from kernels.tile_sizes import cdiv, next_power_of_2

HEAD_TILE = 64
# The tile of cards without room for 64 heads, whose queries and latents take 112 KB for DeepSeek's widths.
SMALL_HEAD_TILE, ROOM_BYTES = 16, 150 << 10


# A program computes up to 64 heads of one query over its selected tokens, 32 at a time, whose latents it gathers. It
# loads a latent once for scores and values. Reads 2 bytes for each value of a selected latent and head tile; does
# 2 * (width + value width) FLOPs for each selected token and head.
@triton.jit(do_not_specialize=["table_stride", "query_tokens"])
def _attend(
    query, pool, block_table, tokens, out, table_stride, heads, scale, kv_scale, query_tokens,
    COUNT: tl.constexpr, PADDED_COUNT: tl.constexpr, VALUE: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_VALUE: tl.constexpr, PADDED_REST: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    table = block_table + number // query_tokens * table_stride
    value_column, rest_column = tl.arange(0, PADDED_VALUE), VALUE + tl.arange(0, PADDED_REST)
    known, values_known, rest_known = head < heads, value_column < VALUE, rest_column < WIDTH
    source = query + (number * heads + head[:, None]) * WIDTH
    query_values = tl.load(source + value_column[None, :], mask=known[:, None] & values_known[None, :], other=0.0)
    query_rest = tl.load(source + rest_column[None, :], mask=known[:, None] & rest_known[None, :], other=0.0)
    tokens += number * COUNT
    every = tl.arange(0, PADDED_COUNT)
    selected = tl.sum((tl.load(tokens + every, mask=every < COUNT, other=-1) >= 0).to(tl.int32), axis=0)
    largest = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    sum_values = tl.zeros([HEADS, PADDED_VALUE], tl.float32)
    for start in range(0, selected, TOKENS):
        place = start + tl.arange(0, TOKENS)
        inside = place < selected
        token = tl.load(tokens + place, mask=inside, other=0)
        block = tl.load(table + token // BLOCK, mask=inside, other=0).to(tl.int64)
        latent = pool + (block * BLOCK + token % BLOCK)[:, None] * WIDTH
        values = tl.load(latent + value_column[None, :], mask=inside[:, None] & values_known[None, :], other=0.0)
        rest = tl.load(latent + rest_column[None, :], mask=inside[:, None] & rest_known[None, :], other=0.0)
        values, rest = values.to(query_values.dtype), rest.to(query_values.dtype)
        scores = tl.dot(query_values, tl.trans(values), input_precision="ieee")
        scores = (scores + tl.dot(query_rest, tl.trans(rest), input_precision="ieee")) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        before = largest
        largest = tl.maximum(before, tl.max(scores, axis=1))
        alpha, weights = tl.exp2(before - largest), tl.exp2(scores - largest[:, None])
        total = total * alpha + tl.sum(weights, axis=1)
        sum_values = sum_values * alpha[:, None]
        sum_values = tl.dot(weights.to(values.dtype), values, sum_values, input_precision="ieee")
    result = sum_values * (kv_scale / total)[:, None]
    target = out + (number * heads + head[:, None]) * VALUE + value_column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=known[:, None] & values_known[None, :])


def mla_selected(
    query: torch.Tensor,
    pool: torch.Tensor,
    plan: DecodePlan,
    tokens: torch.Tensor,
    value_width: int,
    scale: float,
    kv_scale: float,
) -> torch.Tensor:
    queries, heads, width = query.shape
    out = torch.empty(queries, heads, value_width, dtype=query.dtype, device=query.device)
    if not queries:
        return out
    # float32 takes twice the shared memory.
    wide = query.dtype == torch.float32
    most = HEAD_TILE if shared_bytes(query.device) >= ROOM_BYTES else SMALL_HEAD_TILE
    tile = 16 if wide else max(min(most, next_power_of_2(heads)), 16)
    count = tokens.shape[1]
    _attend[(queries, cdiv(heads, tile))](
        query, pool, plan.block_table, tokens, out, plan.block_table.stride(0), heads,
        scale * kv_scale * math.log2(math.e), kv_scale, plan.query_tokens,
        count, next_power_of_2(count), value_width, width,
        max(next_power_of_2(value_width), 16), max(next_power_of_2(width - value_width), 16), tile,
        16 if wide else 32, BLOCK_TOKENS,
        num_warps=8 if tile == HEAD_TILE else 4, num_stages=1 if wide else 2,
    )  # fmt: skip
    return out
