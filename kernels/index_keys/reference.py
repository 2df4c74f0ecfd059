"""The indexer's queries and keys in plain torch: the definition."""

import math

import torch
from torch.nn import functional

from kernels.act_quant.reference import least_power
from kernels.index_keys.queries import IndexQueries
from kernels.kv_copy import BLOCK_TOKENS

SCALE_BYTES = 4
# As in the published kernels: keys of zeros get the scale of this magnitude.
SMALLEST = 1e-4


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
    normalized = functional.layer_norm(projected.float(), weight.shape, weight, bias, epsilon)
    keys = rotate(normalized.unsqueeze(1), rotations, interleaved).squeeze(1)
    if pool.dtype != torch.uint8:
        pool.view(-1, pool.shape[2]).index_copy_(0, slots, keys.to(pool.dtype))
        return
    values, scales = quantize(spread(keys))
    copy_in(torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), dim=1), pool, slots)


def make_queries(
    projected: torch.Tensor,
    weights: torch.Tensor,
    factor: float,
    rotations: torch.Tensor,
    quantized: bool,
    interleaved: bool,
) -> IndexQueries:
    weights = weights.sum(0) * factor
    queries = rotate(projected.float(), rotations, interleaved)
    if not quantized:
        return IndexQueries(queries.to(projected.dtype), weights)
    values, scales = quantize(spread(queries))
    return IndexQueries(values, weights * scales.squeeze(-1))


def rotate(x: torch.Tensor, rotations: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x: [tokens, heads, width] float32, of which the first 2 * pairs numbers are rotated."""
    turned = 2 * rotations.shape[1]
    pairs = x[..., :turned].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    first, second = pairs.unbind(axis)
    real, imaginary = rotations.real.unsqueeze(1), rotations.imag.unsqueeze(1)
    rotated = torch.stack((first * real - second * imaginary, first * imaginary + second * real), dim=axis)
    return torch.cat((rotated.flatten(-2), x[..., turned:]), dim=-1)


def spread(x: torch.Tensor) -> torch.Tensor:
    """x @ H / sqrt(width), where H is Sylvester's Hadamard matrix; width is a power of two. x: [..., width] float32."""
    width, half = x.shape[-1], 1
    assert width & (width - 1) == 0
    while half < width:
        first, second = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return x / math.sqrt(width)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [..., width] float32. Returns e4m3 values and [..., 1] float32 scales: the powers of two that bring the
    largest magnitude to at most 448.
    """
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    scales = least_power(largest / torch.finfo(torch.float8_e4m3fn).max)
    return (x / scales).to(torch.float8_e4m3fn), scales


def read_keys(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if pool.dtype != torch.uint8:
        return pool.view(-1, pool.shape[2]).index_select(0, slots)
    copied = copy_out(pool, slots)
    values, scales = copied[:, :-SCALE_BYTES].contiguous(), copied[:, -SCALE_BYTES:].contiguous()
    return values.view(torch.float8_e4m3fn).float() * scales.view(torch.float32)


def copy_out(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if pool.dtype != torch.uint8:
        return pool.view(-1, pool.shape[2]).index_select(0, slots).view(torch.uint8)
    block, token = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    values, scales = quantized_parts(pool)
    return torch.cat((values[block, token], scales[block, token]), dim=1)


def copy_in(copied: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    if pool.dtype != torch.uint8:
        pool.view(-1, pool.shape[2])[slots] = copied.view(pool.dtype)
        return
    block, token = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    values, scales = quantized_parts(pool)
    values[block, token], scales[block, token] = copied[:, :-SCALE_BYTES], copied[:, -SCALE_BYTES:]


def quantized_parts(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a quantized pool's keys, [blocks, 64, width] uint8, and of its scales, [blocks, 64, 4] uint8."""
    blocks, width = len(pool), pool.shape[2] - SCALE_BYTES
    flat = pool.view(blocks, -1)
    values, scales = flat.split([BLOCK_TOKENS * width, BLOCK_TOKENS * SCALE_BYTES], dim=1)
    return values.unflatten(1, (BLOCK_TOKENS, width)), scales.unflatten(1, (BLOCK_TOKENS, SCALE_BYTES))
