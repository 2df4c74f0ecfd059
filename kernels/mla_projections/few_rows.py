"""Queries of a few rows into the latent's space on Hopper, in Triton: any widths of a head."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.few_rows import are_few
from kernels.hopper import is_hopper
from kernels.rope.triton import join_pairs, rotate_pairs, split_pairs
from kernels.tile_sizes import cdiv, next_power_of_2

# Weights of a program, which hold 64 registers of a thread, and its warps.
TILE, WARPS = 1 << 14, 4


# A program computes some channels of the latent for one head and all rows, with weights that it holds in registers
# before it waits. A head's first program rotates too. Reads 2 bytes a weight once.
@triton.jit
def _absorb(
    query, weight, rotations, out, latent, row_stride, head_stride, weight_stride, ROWS: tl.constexpr,
    NOPE: tl.constexpr, NOPE_TILE: tl.constexpr, LATENT_TILE: tl.constexpr, PAIRS: tl.constexpr,
    PAIRS_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    head = tl.program_id(1).to(tl.int64)
    own, turned = tl.arange(0, NOPE_TILE), tl.arange(0, 2 * PAIRS_TILE)[None, :]
    channel = tl.program_id(0) * LATENT_TILE + tl.arange(0, LATENT_TILE)
    inside, there = own < NOPE, channel < latent
    held = weight + head * weight_stride + own[:, None] * latent + channel[None, :]
    held = tl.load(held, mask=inside[:, None] & there[None, :], other=0.0)
    wait_for_earlier(DEPENDENT)
    for row in tl.static_range(ROWS):
        source = query + row * row_stride + head * head_stride
        target = out + (row * tl.num_programs(1) + head) * (latent + 2 * PAIRS)
        values = tl.load(source + own, mask=inside, other=0.0)
        total = tl.sum(held.to(tl.float32) * values.to(tl.float32)[:, None], axis=0)
        tl.store(target + channel, total.to(values.dtype), mask=there)
        if tl.program_id(0) == 0:
            known = turned < 2 * PAIRS
            first, second = split_pairs(tl.load(source + NOPE + turned, mask=known, other=0.0).to(tl.float32))
            cosine, sine = split_pairs(tl.load(rotations + row * 2 * PAIRS + turned, mask=known, other=0.0))
            rotated = join_pairs(*rotate_pairs(first, second, cosine, sine))
            tl.store(target + latent + turned, rotated.to(values.dtype), mask=known)


def takes(query: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are few rows of what `absorb_query` is given."""
    return is_hopper() and query.dtype == torch.bfloat16 and are_few(query) and weight.shape[1] <= TILE // 32


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """As `kernels.mla_projections.absorb_query`."""
    (rows, heads, width), (nope, latent) = query.shape, weight.shape[1:]
    out = query.new_empty(rows, heads, latent + width - nope)
    padded, pairs = next_power_of_2(nope), (width - nope) // 2
    tile = min(TILE // padded, next_power_of_2(latent))
    launch(_absorb, (cdiv(latent, tile), heads), query.device,
        query, weight, torch.view_as_real(rotations), out, latent, query.stride(0), query.stride(1), weight.stride(0),
        rows, nope, padded, tile, pairs, next_power_of_2(pairs), num_warps=WARPS,
    )  # fmt: skip
    return out
