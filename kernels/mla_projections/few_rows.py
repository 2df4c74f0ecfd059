"""Queries of a few rows into the latent's space on Hopper, in Triton: any widths of a head. If queries are projected
directly, the same kernel normalizes, rotates and stores the tokens' latents.
"""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.few_rows import are_few
from kernels.hopper import is_hopper
from kernels.kv_copy.triton import compress
from kernels.norm.triton import normalize
from kernels.rope.triton import join_pairs, rotate_pairs, split_pairs
from kernels.tile_sizes import cdiv, next_power_of_2

# Weights of a program, which hold 64 registers of a thread, and its warps.
TILE, WARPS = 1 << 14, 4


# A program computes some channels of the latent for one head and all rows, with weights that it holds in registers
# before it waits. A head's first program rotates too. Reads 2 bytes a weight once. WRITES: there are programs for one
# more head, which write latents or keys of some rows instead: one after the other in one program they took 3 us more.
@triton.jit
def _absorb(
    query, weight, rotations, out, latents, latent_weight, slots, pool, latent, heads, row_stride, head_stride,
    weight_stride, latents_stride, epsilon, pool_scale, ROWS: tl.constexpr, NOPE: tl.constexpr, NOPE_TILE: tl.constexpr,
    LATENT_TILE: tl.constexpr, PAIRS: tl.constexpr, PAIRS_TILE: tl.constexpr, WRITES: tl.constexpr,
    LATENT_GROUPS: tl.constexpr, GROUP: tl.constexpr, COMPRESS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    head, width = tl.program_id(1).to(tl.int64), latent + 2 * PAIRS
    if WRITES and head == heads:
        place = tl.arange(0, LATENT_GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        column = tl.arange(0, 2 * PAIRS_TILE)[None, :]
        factors = tl.load(latent_weight + place, mask=place < latent, other=0.0)
        wait_for_earlier(DEPENDENT)
        for half in range(tl.program_id(0), 2 * ROWS, tl.num_programs(0)):
            row = half // 2
            own = latents + row * latents_stride
            target = pool + tl.load(slots + row) * width
            if half % 2 == 0:
                found = tl.load(own + place, mask=place < latent, other=0.0)
                made = normalize(found.to(tl.float32), factors, latent, epsilon)
                stored = compress(made.to(tl.float32), pool_scale) if COMPRESS else made
                tl.store(target + place, stored, mask=place < latent)
            else:
                key = tl.load(own + latent + column, mask=column < 2 * PAIRS, other=0.0)
                turns = tl.load(rotations + row * 2 * PAIRS + column, mask=column < 2 * PAIRS, other=0.0)
                own_cosine, own_sine = split_pairs(turns)
                even, odd = split_pairs(key.to(tl.float32))
                # Rounds first, as where prompts read what is stored.
                rotated_key = join_pairs(*rotate_pairs(even, odd, own_cosine, own_sine)).to(key.dtype)
                stored_key = compress(rotated_key.to(tl.float32), pool_scale) if COMPRESS else rotated_key
                tl.store(target + latent + column, stored_key, mask=column < 2 * PAIRS)
    else:
        own, turned = tl.arange(0, NOPE_TILE), tl.arange(0, 2 * PAIRS_TILE)[None, :]
        channel = tl.program_id(0) * LATENT_TILE + tl.arange(0, LATENT_TILE)
        inside, there = own < NOPE, channel < latent
        held = weight + head * weight_stride + own[:, None] * latent + channel[None, :]
        held = tl.load(held, mask=inside[:, None] & there[None, :], other=0.0)
        wait_for_earlier(DEPENDENT)
        for row in tl.static_range(ROWS):
            source = query + row * row_stride + head * head_stride
            target = out + (row * heads + head) * width
            values = tl.load(source + own, mask=inside, other=0.0)
            if tl.program_id(0) == 0:
                # First: if these loads followed a store, they would begin only then.
                known = turned < 2 * PAIRS
                first, second = split_pairs(tl.load(source + NOPE + turned, mask=known, other=0.0).to(tl.float32))
                cosine, sine = split_pairs(tl.load(rotations + row * 2 * PAIRS + turned, mask=known, other=0.0))
                rotated = join_pairs(*rotate_pairs(first, second, cosine, sine))
                tl.store(target + latent + turned, rotated.to(values.dtype), mask=known)
            total = tl.sum(held.to(tl.float32) * values.to(tl.float32)[:, None], axis=0)
            tl.store(target + channel, total.to(values.dtype), mask=there)


def takes(query: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are few rows of what `absorb_query` is given."""
    return is_hopper() and query.dtype == torch.bfloat16 and are_few(query) and weight.shape[1] <= TILE // 32


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """As `kernels.mla_projections.absorb_query`."""
    return _launch(query, weight, rotations, None, None, None, None, 0.0, 0.0)


def write_and_absorb(
    query: torch.Tensor,
    latents: torch.Tensor,
    weight: torch.Tensor,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `kernels.mla_projections.write_and_absorb`."""
    return _launch(query, weight, rotations, latents, latent_weight, slots, pool, epsilon, scale)


def _launch(
    query: torch.Tensor,
    weight: torch.Tensor,
    rotations: torch.Tensor,
    latents: torch.Tensor | None,
    latent_weight: torch.Tensor | None,
    slots: torch.Tensor | None,
    pool: torch.Tensor | None,
    epsilon: float,
    scale: float,
) -> torch.Tensor:
    (rows, heads, width), (nope, latent) = query.shape, weight.shape[1:]
    out = query.new_empty(rows, heads, latent + width - nope)
    padded, pairs, writes = next_power_of_2(nope), (width - nope) // 2, latents is not None
    tile = min(TILE // padded, next_power_of_2(latent))
    launch(_absorb, (cdiv(latent, tile), heads + int(writes)), query.device,
        query, weight, torch.view_as_real(rotations), out, latents, latent_weight, slots, pool, latent, heads,
        query.stride(0), query.stride(1), weight.stride(0), 0 if latents is None else latents.stride(0), epsilon, scale,
        rows, nope, padded, tile, pairs, next_power_of_2(pairs), writes, next_power_of_2(cdiv(latent, GROUP)), GROUP,
        pool is not None and pool.dtype != query.dtype, num_warps=WARPS,
    )  # fmt: skip
    return out
