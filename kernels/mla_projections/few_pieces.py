"""Pieces of attended latents to values of bfloat16, for a few rows on Hopper, in Triton: joined on the way."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.few_rows import are_few
from kernels.hopper import is_hopper
from kernels.mla_decode.attended import Attended
from kernels.tile_sizes import cdiv, next_power_of_2

# Values that a program computes of a head, whose weights hold 64 registers of a thread; its warps, and the pieces that
# it has in flight at once, as many bytes.
VALUES, WARPS, PIECES = 32, 4, 32


# A program computes some values of one head and row. It joins all pieces of the head for itself: 1 KB each, from the
# second-level cache. Its weights, and where the pieces are, it reads before it waits: the schedule of a step was
# written by a kernel that has ended.
@triton.jit
def _expand_pieces(
    latents, pieces, log_sums, splits, weight, out, parts, query_tokens, heads, value, weight_stride,
    LATENT: tl.constexpr, VALUES: tl.constexpr, PIECES: tl.constexpr, PARTS_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    channel, part = tl.arange(0, LATENT), tl.arange(0, PARTS_TILE)
    own = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    held = weight + head * weight_stride + own[:, None] * LATENT + channel[None, :]
    held = tl.load(held, mask=(own < value)[:, None], other=0.0)
    known = part < parts
    request = tl.load(splits + part * 4, mask=known, other=-1)
    first = tl.load(splits + part * 4 + 1, mask=known, other=0)
    last = tl.load(splits + part * 4 + 2, mask=known, other=0)
    mine = (request == row // query_tokens) & (last > first)
    begin, end = tl.sum(tl.where(mine, first, 0), axis=0), tl.sum(tl.where(mine, last, 0), axis=0)
    wait_for_earlier(DEPENDENT)
    if end > begin:
        largest, total = -1e30, 0.0
        joined = tl.zeros([LATENT], tl.float32)
        for at in range(begin, end, PIECES):
            piece = at + tl.arange(0, PIECES)
            place = (piece.to(tl.int64) * query_tokens + row % query_tokens) * heads + head
            sums = tl.load(log_sums + place, mask=piece < end, other=-1e30)
            found = pieces + place[:, None] * LATENT + channel[None, :]
            found = tl.load(found, mask=(piece < end)[:, None], other=0.0).to(tl.float32)
            higher = tl.maximum(largest, tl.max(sums, axis=0))
            shares = tl.exp2(sums - higher)
            joined = joined * tl.exp2(largest - higher) + tl.sum(found * shares[:, None], axis=0)
            total = total * tl.exp2(largest - higher) + tl.sum(shares, axis=0)
            largest = higher
        joined = joined / total
    else:
        joined = tl.load(latents + (row * heads + head) * LATENT + channel).to(tl.float32)
    # Rounded as where a kernel of its own joins them.
    joined = joined.to(held.dtype).to(tl.float32)
    product = tl.sum(held.to(tl.float32) * joined[None, :], axis=1)
    tl.store(out + (row * heads + head) * value + own, product.to(held.dtype), mask=own < value)


def takes(attended: Attended, weight: torch.Tensor) -> bool:
    """Whether there are pieces, of few rows. weight: as in `expand_values`."""
    latents = attended.latents
    fits = latents.dtype == torch.bfloat16 and latents.shape[2] == next_power_of_2(latents.shape[2])
    rows = weight.stride()[1:] == (1, latents.shape[2])
    return is_hopper() and attended.pieces is not None and are_few(latents) and fits and rows


def expand_pieces(attended: Attended, weight: torch.Tensor) -> torch.Tensor:
    """As `kernels.mla_projections.expand_values`, for what it `takes`."""
    pieces, (rows, heads, latent), value = attended.pieces, attended.latents.shape, weight.shape[2]
    assert pieces is not None
    out = attended.latents.new_empty(rows, heads, value)
    parts = len(pieces.split_requests)
    launch(_expand_pieces, (cdiv(value, VALUES), heads, rows), out.device,
        attended.latents, pieces.values, pieces.log_sums, pieces.split_requests, weight, out, parts,
        pieces.work.query_tokens, heads, value, weight.stride(0), latent, VALUES, PIECES, next_power_of_2(parts),
        num_warps=WARPS,
    )  # fmt: skip
    return out
