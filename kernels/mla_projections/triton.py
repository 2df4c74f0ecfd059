"""The products around absorbed attention for few tokens in Triton, with what stands before and behind them."""

import math

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.rope.triton import join_pairs, rotate_pairs, split_pairs

# Of a head's latent, a program of the first product makes one of two parts, so many columns at a time.
PARTS, COLUMNS, COLUMN_STAGES = 2, 64, 4
# Inputs of the second at a time; all of them on the way where there is room beside few tokens.
INPUTS, INPUT_STAGES, FEW_ROWS, FEW_ROWS_STAGES = 64, 5, 32, 8
# Tokens of a program.
ROWS = 128
# Of the tensor cores' products.
NARROWEST = 16


# A program multiplies the queries of one head by a part of the head's weight, and turns as many of their other pairs.
# Reads each weight once for ROWS tokens: 2 bytes, for 2 operations a token, which up to some two hundred tokens is the
# time. All weights are on the way at once, two programs on a multiprocessor; what is made of the first is written while
# the last arrive.
@triton.jit
def _absorb_queries(
    query, weight, rotations, out, tokens, query_row, query_head, weight_head,
    NOPE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    part, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start_next(DEPENDENT)
    inner = tl.arange(0, NOPE)
    width: tl.constexpr = LATENT // PARTS
    weight += head * weight_head + part * width + inner * LATENT
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    there = (row < tokens)[:, None]
    of_row = query + tl.minimum(row, tokens - 1).to(tl.int64)[:, None] * query_row + head * query_head
    turned = part * (ROPE // PARTS) + tl.arange(0, ROPE // PARTS)[None, :]
    wait_for_earlier(DEPENDENT)
    found = tl.load(of_row + inner[None, :])
    pairs = tl.load(of_row + NOPE + turned)
    angles = tl.load(rotations + tl.minimum(row, tokens - 1).to(tl.int64)[:, None] * ROPE + turned)
    out += (row.to(tl.int64) * heads + head)[:, None] * (LATENT + ROPE)
    for first in tl.range(0, width, COLUMNS, num_stages=STAGES):
        column = first + tl.arange(0, COLUMNS)[None, :]
        product = tl.dot(found, tl.load(weight[:, None] + column), input_precision="ieee")
        tl.store(out + part * width + column, product.to(found.dtype), mask=there)
    cosine, sine = split_pairs(angles)
    left, right = split_pairs(pairs.to(tl.float32))
    tl.store(out + LATENT + turned, join_pairs(*rotate_pairs(left, right, cosine, sine)).to(found.dtype), mask=there)


# A program multiplies ROWS tokens' attended latents of one head by the head's weight, and quantizes these values, which
# are one group. Reads each weight once for ROWS tokens: 2 bytes, for 2 operations a token, which up to some two hundred
# tokens is the time. One program for a multiprocessor, with most of its loads on the way at once.
@triton.jit
def _expand_values(
    attended, weight, values, scales, tokens, weight_head, weight_value, scale_stride,
    LATENT: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(0), tl.num_programs(0)
    start_next(DEPENDENT)
    value = tl.arange(0, VALUE)
    weight += head * weight_head + value * weight_value
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    there = row < tokens
    attended += (tl.minimum(row, tokens - 1) * heads + head)[:, None] * LATENT
    wait_for_earlier(DEPENDENT)
    total = tl.zeros([ROWS, VALUE], tl.float32)
    for first in tl.range(0, LATENT, INPUTS, num_stages=STAGES):
        inner = first + tl.arange(0, INPUTS)
        left, right = tl.load(attended + inner[None, :]), tl.load(weight[None, :] + inner[:, None])
        total = tl.dot(left, right, total, input_precision="ieee")
    quantized, factors = quantize_groups(total)
    tl.store(values + (row * heads + head)[:, None] * VALUE + value[None, :], quantized, mask=there[:, None])
    tl.store(scales + head * scale_stride + row, factors, mask=there)


def takes_queries(nope: int, rope: int, latent: int) -> bool:
    """Whether widths make whole tiles."""
    whole_tiles = nope >= NARROWEST and latent % (PARTS * NARROWEST) == 0
    return whole_tiles and _is_power(nope) and _is_power(rope) and rope >= 2 * PARTS


def takes_values(latent: int, value: int) -> bool:
    """Whether a head's values are one group, and its latent makes whole tiles."""
    return value == GROUP and latent % NARROWEST == 0


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    (tokens, heads, width), (nope, latent) = query.shape, weight.shape[1:]
    rope = width - nope
    out = query.new_empty(tokens, heads, latent + rope)
    if not tokens:
        return out
    rows = _rows(tokens)
    _absorb_queries[(PARTS, heads, triton.cdiv(tokens, rows))](
        query, weight, torch.view_as_real(rotations), out, tokens, query.stride(0), query.stride(1), weight.stride(0),
        nope, latent, rope, PARTS, rows, math.gcd(latent // PARTS, COLUMNS), COLUMN_STAGES, num_warps=4,
        **dependent_launch(query.device),
    )  # fmt: skip
    return out


def expand_values_quantized(attended: torch.Tensor, weight: torch.Tensor) -> Quantized:
    tokens, heads, latent = attended.shape
    out = empty_quantized(tokens, heads * GROUP, device=attended.device)
    if not tokens:
        return out
    rows = _rows(tokens)
    _expand_values[(heads, triton.cdiv(tokens, rows))](
        attended, weight, out.values, out.scales, tokens, weight.stride(0), weight.stride(2), out.scales.stride(1),
        latent, GROUP, rows, math.gcd(latent, INPUTS), FEW_ROWS_STAGES if rows <= FEW_ROWS else INPUT_STAGES,
        num_warps=8, **dependent_launch(attended.device),
    )  # fmt: skip
    return out


def _rows(tokens: int) -> int:
    return min(max(triton.next_power_of_2(tokens), NARROWEST), ROWS)


def _is_power(width: int) -> bool:
    return width & (width - 1) == 0
