"""The indexer's queries and keys in Triton: norm, rotation, Hadamard matrix, quantization and write in one launch."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.triton import least_power
from kernels.index_keys.queries import IndexQueries
from kernels.index_keys.reference import SCALE_BYTES, SMALLEST
from kernels.kv_copy import BLOCK_TOKENS
from kernels.tile_sizes import cdiv

# Keys, or queries of a head, of a program: the fewest that a product takes.
ROWS = 16


# A program normalizes, rotates and writes 16 keys. Reads 2 bytes for each number, and again for the other of its pair;
# writes 1 or 2. The Hadamard matrix takes 2 * width FLOPs a number.
@triton.jit(do_not_specialize=["tokens"])
def _write_keys(
    projected, weight, bias, turns, slots, pool, scales, tokens, row_stride, epsilon, block_stride, scale_stride,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, QUANTIZED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    known = (token < tokens)[:, None]
    partner, pair, sign = _paired(column, PAIRS, INTERLEAVED)
    source = projected + token[:, None] * row_stride
    own = tl.load(source + column[None, :], mask=known, other=0.0).to(tl.float32)
    other = tl.load(source + partner[None, :], mask=known, other=0.0).to(tl.float32)
    mean = (tl.sum(own, axis=1) / WIDTH)[:, None]
    variance = (tl.sum((own - mean) * (own - mean), axis=1) / WIDTH)[:, None]
    factor = 1.0 / tl.sqrt(variance + epsilon)
    own = (own - mean) * factor * tl.load(weight + column)[None, :] + tl.load(bias + column)[None, :]
    other = (other - mean) * factor * tl.load(weight + partner)[None, :] + tl.load(bias + partner)[None, :]
    key = _rotated(own, other, turns + token[:, None] * 2 * PAIRS, column, pair, sign, known, PAIRS)
    slot = tl.load(slots + token, mask=token < tokens, other=0)
    block, place = slot // BLOCK, slot % BLOCK
    target = pool + (block * block_stride + place * WIDTH)[:, None] + column[None, :]
    if QUANTIZED:
        values, scale = _quantized(key, WIDTH, SMALLEST)
        tl.store(target, values, mask=known)
        tl.store(scales + block * scale_stride + BLOCK * WIDTH // 4 + place, scale, mask=token < tokens)
    else:
        tl.store(target, key.to(pool.dtype.element_ty), mask=known)


# A program rotates and quantizes the queries of 16 heads, of one token or several. Reads and writes as for keys.
@triton.jit(do_not_specialize=["rows", "shares"])
def _make_queries(
    projected, weights, turns, values, scaled, rows, heads, shares, factor,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, QUANTIZED: tl.constexpr, ROWS: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    known = (row < rows)[:, None]
    partner, pair, sign = _paired(column, PAIRS, INTERLEAVED)
    source = projected + row[:, None] * WIDTH
    own = tl.load(source + column[None, :], mask=known, other=0.0).to(tl.float32)
    other = tl.load(source + partner[None, :], mask=known, other=0.0).to(tl.float32)
    query = _rotated(own, other, turns + (row // heads)[:, None] * 2 * PAIRS, column, pair, sign, known, PAIRS)
    target = values + row[:, None] * WIDTH + column[None, :]
    weight = tl.zeros([ROWS], tl.float32)
    for share in range(shares):
        weight += tl.load(weights + share * rows + row, mask=row < rows, other=0.0)
    weight *= factor
    if QUANTIZED:
        quantized, scale = _quantized(query, WIDTH, SMALLEST)
        tl.store(target, quantized, mask=known)
        tl.store(scaled + row, weight * scale, mask=row < rows)
    else:
        tl.store(target, query.to(values.dtype.element_ty), mask=known)
        tl.store(scaled + row, weight, mask=row < rows)


@triton.jit
def _paired(column, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """By column: the other column of its pair, the pair, and the sign of the other's part. Columns after those that are
    rotated are their own partners.
    """
    if INTERLEAVED:
        partner, pair, first = column ^ 1, column // 2, column % 2 == 0
    else:
        first = column < PAIRS
        partner, pair = tl.where(first, column + PAIRS, column - PAIRS), column % PAIRS
    rotated = column < 2 * PAIRS
    return tl.where(rotated, partner, column), tl.where(rotated, pair, 0), tl.where(first, -1.0, 1.0)


@triton.jit
def _rotated(own, other, turns, column, pair, sign, known, PAIRS: tl.constexpr):
    inside = known & (column < 2 * PAIRS)[None, :]
    real = tl.load(turns + 2 * pair[None, :], mask=inside, other=1.0)
    imaginary = tl.load(turns + 2 * pair[None, :] + 1, mask=inside, other=0.0)
    return own * real + other * imaginary * sign[None, :]


@triton.jit
def _quantized(x, WIDTH: tl.constexpr, SMALLEST: tl.constexpr):
    """The rows times the Hadamard matrix, in e4m3, and their scales."""
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    # Whether a number has an odd number of ones.
    odd = row & column
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    x = tl.dot(x, 1.0 - 2.0 * (odd & 1).to(tl.float32), input_precision="ieee") * (WIDTH**-0.5)
    largest = tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST)
    scale = least_power(tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32)))
    return (x / scale[:, None]).to(tl.float8e4nv), scale


def write_keys(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    interleaved: bool,
) -> None:
    tokens, width = projected.shape
    if not tokens:
        return
    quantized = pool.dtype == torch.uint8
    keys, scales = (pool.view(torch.float8_e4m3fn), pool.view(torch.float32)) if quantized else (pool, pool)
    _write_keys[(cdiv(tokens, ROWS),)](
        projected, weight, bias, torch.view_as_real(rotations), slots, keys, scales, tokens, projected.stride(0),
        epsilon, BLOCK_TOKENS * pool.shape[2], BLOCK_TOKENS * (width + SCALE_BYTES) // 4,
        width, rotations.shape[1], interleaved, quantized, ROWS, BLOCK_TOKENS, SMALLEST,
        num_warps=4,
    )  # fmt: skip


def make_queries(
    projected: torch.Tensor,
    weights: torch.Tensor,
    factor: float,
    rotations: torch.Tensor,
    quantized: bool,
    interleaved: bool,
) -> IndexQueries:
    tokens, heads, width = projected.shape
    values = torch.empty_like(projected, dtype=torch.float8_e4m3fn if quantized else projected.dtype)
    scaled = torch.empty_like(weights[0])
    if tokens:
        _make_queries[(cdiv(tokens * heads, ROWS),)](
            projected, weights, torch.view_as_real(rotations), values, scaled, tokens * heads, heads,
            len(weights), factor,
            width, rotations.shape[1], interleaved, quantized, ROWS, SMALLEST,
            num_warps=4,
        )  # fmt: skip
    return IndexQueries(values, scaled)
