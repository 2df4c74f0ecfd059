"""The products around absorbed attention for few tokens in Triton, with what stands before and behind them."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.rope.triton import join_pairs, rotate_pairs, split_pairs

# Of a latent, by one program of the first product; inputs at a time of the second.
COLUMNS, INPUTS = 128, 64
# Tokens at a time.
ABSORBED_ROWS, EXPANDED_ROWS = 64, 128
STAGES = 5


# A program multiplies the queries of one head by COLUMNS columns of the head's weight, and turns as many of their other
# pairs as fall to it. Reads each weight once, and before it waits: 2 bytes, for 2 operations a token. Up to some two
# hundred tokens that is the time; four programs share a multiprocessor, so that all weights are on the way at once.
@triton.jit
def _absorb(
    query, weight, rotations, out, tokens, query_row, query_head, weight_head,
    NOPE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, NOPE_TILE: tl.constexpr, ROPE_TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    part, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    start_next(DEPENDENT)
    inner = tl.arange(0, NOPE_TILE)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    known = (inner < NOPE)[:, None] & (column < LATENT)[None, :]
    factors = tl.load(weight + head * weight_head + inner[:, None] * LATENT + column[None, :], mask=known, other=0.0)
    wait_for_earlier(DEPENDENT)
    turned = part * ROPE_TILE + tl.arange(0, ROPE_TILE)
    query += head * query_head
    for first in range(0, tokens, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        there = row < tokens
        found = tl.load(query + row * query_row + inner[None, :], mask=there & (inner < NOPE)[None, :], other=0.0)
        rest = there & (turned < ROPE)[None, :]
        pairs = tl.load(query + row * query_row + NOPE + turned[None, :], mask=rest, other=0.0)
        cosine, sine = split_pairs(tl.load(rotations + row * ROPE + turned[None, :], mask=rest, other=0.0))
        of_row = out + (row * heads + head) * (LATENT + ROPE)
        product = tl.dot(found, factors, input_precision="ieee")
        tl.store(of_row + column[None, :], product.to(found.dtype), mask=there & (column < LATENT)[None, :])
        left, right = split_pairs(pairs.to(tl.float32))
        result = join_pairs(*rotate_pairs(left, right, cosine, sine))
        tl.store(of_row + LATENT + turned[None, :], result.to(pairs.dtype), mask=rest)


# A program multiplies ROWS tokens' attended latents of one head by the head's weight, and quantizes these values, which
# are one group. Reads each weight once for ROWS tokens: 2 bytes, for 2 operations a token, which up to some two hundred
# tokens is the time. One program for a multiprocessor, with several loads on the way.
@triton.jit
def _expand(
    attended, weight, out, scales, tokens, weight_head, weight_value, scale_stride,
    QUANTIZE: tl.constexpr, LATENT: tl.constexpr, VALUE: tl.constexpr, VALUE_TILE: tl.constexpr, ROWS: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head, heads = tl.program_id(0), tl.num_programs(0)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    value = tl.arange(0, VALUE_TILE)
    start_next(DEPENDENT)
    weight += head * weight_head + value * weight_value
    there, wanted = (row < tokens)[:, None], (value < VALUE)[None, :]
    wait_for_earlier(DEPENDENT)
    total = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    for first in tl.range(0, LATENT, INPUTS, num_stages=STAGES):
        inner = first + tl.arange(0, INPUTS)
        of_row = attended + (row[:, None] * heads + head) * LATENT + inner[None, :]
        left = tl.load(of_row, mask=there & (inner < LATENT)[None, :], other=0.0)
        right = tl.load(weight[None, :] + inner[:, None], mask=wanted & (inner < LATENT)[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    places = out + (row[:, None] * heads + head) * VALUE + value[None, :]
    if QUANTIZE:
        quantized, factors = quantize_groups(total)
        tl.store(places, quantized, mask=there)
        tl.store(scales + head * scale_stride + row, factors, mask=row < tokens)
    else:
        tl.store(places, total.to(out.dtype.element_ty), mask=there & wanted)


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    (tokens, heads, width), (nope, latent) = query.shape, weight.shape[1:]
    rope = width - nope
    out = query.new_empty(tokens, heads, latent + rope)
    if not tokens:
        return out
    parts = triton.cdiv(latent, COLUMNS)
    _absorb[(parts, heads)](
        query, weight, torch.view_as_real(rotations), out, tokens, query.stride(0), query.stride(1), weight.stride(0),
        nope, latent, rope, _tile(nope), max(triton.next_power_of_2(triton.cdiv(rope, parts)), 2),
        min(_tile(tokens), ABSORBED_ROWS), COLUMNS, num_warps=4, num_stages=1, **dependent_launch(query.device),
    )  # fmt: skip
    return out


def expand_values(attended: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = attended.new_empty(*attended.shape[:2], weight.shape[2])
    _launch_expansion(attended, weight, out, None)
    return out


def expand_values_quantized(attended: torch.Tensor, weight: torch.Tensor) -> Quantized:
    tokens, heads, _ = attended.shape
    out = empty_quantized(tokens, heads * GROUP, device=attended.device)
    _launch_expansion(attended, weight, out.values, out.scales)
    return out


def _launch_expansion(
    attended: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None
) -> None:
    (tokens, heads, latent), value = attended.shape, weight.shape[2]
    if not tokens:
        return
    rows = min(_tile(tokens), EXPANDED_ROWS)
    _expand[(heads, triton.cdiv(tokens, rows))](
        attended, weight, out, scales, tokens, weight.stride(0), weight.stride(2),
        0 if scales is None else scales.stride(1), scales is not None, latent, value, _tile(value), rows, INPUTS,
        STAGES, num_warps=8 if rows >= 64 else 4, **dependent_launch(attended.device),
    )  # fmt: skip


def _tile(width: int) -> int:
    """As wide as the tensor cores' products have to be at least."""
    return max(triton.next_power_of_2(width), 16)
