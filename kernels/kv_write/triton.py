"""Norms, rotation, quantization and the write to the pool in Triton, in one launch."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.kv_copy.triton import compress
from kernels.norm.triton import normalize
from kernels.rope.triton import join_pairs, rotate_pairs, split_pairs
from kernels.tile_sizes import cdiv, next_power_of_2

# Warps of a program. Few tokens leave much of the chip idle, and the time is that of one program: it gets more warps.
WARPS, FEW_TOKENS, FEW_TOKENS_WARPS = 4, 256, 16


# Two programs do a token: one its query, one its latent and key. Reads 2 bytes a value; writes 1 or 2 for the query,
# and for the latent 2 in place and 1 or 2 in the pool.
@triton.jit(do_not_specialize=["scale_stride"])
def _norm_and_write(
    projected, query_weight, latent_weight, rotations, slots, query, values, scales, pool,
    row_stride, query_width, latent_width, pairs, scale_stride, epsilon, pool_scale,
    QUERY: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr, COMPRESS: tl.constexpr,
    QUERY_GROUPS: tl.constexpr, LATENT_GROUPS: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    width = latent_width + 2 * pairs
    source = projected + token * row_stride
    if tl.program_id(1) == 0:
        place = tl.arange(0, LATENT_GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        latent_factors = tl.load(latent_weight + place, mask=place < latent_width, other=0.0)
        wait_for_earlier(DEPENDENT)
        own = source + query_width
        target = pool + tl.load(slots + token) * width
        _write_latent(own, target, latent_factors, place, latent_width, epsilon, pool_scale, COMPRESS)
        turns = rotations + token * 2 * pairs
        _write_key(own + latent_width, target + latent_width, turns, pairs, pool_scale, COMPRESS, PAIRS)
    elif QUERY:
        group = tl.arange(0, QUERY_GROUPS)
        column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = column < query_width
        factors = tl.load(query_weight + column, mask=inside, other=0.0)
        wait_for_earlier(DEPENDENT)
        found = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        normalized = normalize(found, factors, query_width, epsilon)
        if QUANTIZE:
            quantized, group_scales = quantize_groups(normalized.to(tl.float32), POWERS)
            tl.store(values + token * query_width + column, quantized, mask=inside)
            tl.store(scales + group * scale_stride + token, group_scales, mask=group * GROUP < query_width)
        else:
            tl.store(query + token * query_width + column, normalized, mask=inside)


@triton.jit
def _write_latent(own, target, factors, column, width, epsilon, scale, COMPRESS: tl.constexpr):
    inside = column < width
    found = tl.load(own + column, mask=inside, other=0.0).to(tl.float32)
    normalized = normalize(found, factors, width, epsilon)
    tl.store(own + column, normalized, mask=inside)
    if COMPRESS:
        tl.store(target + column, compress(normalized.to(tl.float32), scale), mask=inside)
    else:
        tl.store(target + column, normalized, mask=inside)


@triton.jit
def _write_key(own, target, turns, pairs, scale, COMPRESS: tl.constexpr, PAIRS: tl.constexpr):
    column = tl.arange(0, 2 * PAIRS)[None, :]
    inside = column < 2 * pairs
    found = tl.load(own + column, mask=inside, other=0.0)
    first, second = split_pairs(found.to(tl.float32))
    cosine, sine = split_pairs(tl.load(turns + column, mask=inside, other=0.0))
    # Rounds first, so that the pool holds what the prompt's own attention sees.
    turned = join_pairs(*rotate_pairs(first, second, cosine, sine)).to(found.dtype)
    tl.store(own + column, turned, mask=inside)
    if COMPRESS:
        tl.store(target + column, compress(turned.to(tl.float32), scale), mask=inside)
    else:
        tl.store(target + column, turned, mask=inside)


def norm_and_write(
    projected: torch.Tensor,
    query_weight: torch.Tensor | None,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    query_width = projected.shape[1] - pool.shape[2]
    query = projected[:, :query_width]
    if query_weight is not None:
        query = torch.empty(len(projected), query_width, dtype=projected.dtype, device=projected.device)
    _launch(projected, query_weight, latent_weight, epsilon, rotations, slots, pool, scale, query, None)
    return query


def norm_quantize_and_write(
    projected: torch.Tensor,
    query_weight: torch.Tensor,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
    powers: bool = False,
) -> Quantized:
    out = empty_quantized(len(projected), query_weight.shape[0], device=projected.device, powers=powers)
    _launch(projected, query_weight, latent_weight, epsilon, rotations, slots, pool, scale, None, out)
    return out


def _launch(
    projected: torch.Tensor,
    query_weight: torch.Tensor | None,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
    query: torch.Tensor | None,
    quantized: Quantized | None,
) -> None:
    tokens, width = projected.shape
    if not tokens:
        return
    query_width, latent_width = width - pool.shape[2], latent_weight.shape[0]
    pairs = (pool.shape[2] - latent_width) // 2
    launch(_norm_and_write, (tokens, 1 if query_weight is None else 2), projected.device,
        projected, query_weight, latent_weight, torch.view_as_real(rotations), slots, query,
        None if quantized is None else quantized.values, None if quantized is None else quantized.scales, pool,
        projected.stride(0), query_width, latent_width, pairs,
        0 if quantized is None else quantized.scales.stride(1), epsilon, scale,
        query_weight is not None, quantized is not None, quantized is not None and quantized.powers,
        pool.dtype != projected.dtype,
        next_power_of_2(cdiv(query_width, GROUP)),
        next_power_of_2(cdiv(latent_width, GROUP)),
        next_power_of_2(pairs), GROUP, num_warps=FEW_TOKENS_WARPS if tokens <= FEW_TOKENS else WARPS,
    )  # fmt: skip
