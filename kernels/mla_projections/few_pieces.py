"""Pieces of attended latents to values of bfloat16, for a few rows on Hopper, in Triton: joined on the way."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.kv_copy import BLOCK_TOKENS
from kernels.mla_decode.attended import Attended, EvenPieces
from kernels.tile_sizes import cdiv

# Values that a program computes of a head, its warps, and the pieces that it has in flight at once: those of contexts
# of up to 4,096 tokens.
VALUES, WARPS, PIECES = 32, 8, 64


# A program computes some values of one head and row. It joins all pieces of the head for itself: 1 KB each, from the
# second-level cache. It reads its weights and the context's length, which says how many pieces there are, before it
# waits.
@triton.jit
def _expand_pieces(
    pieces, log_sums, lengths, weight, out, query_tokens, heads, value, weight_stride, SPLITS: tl.constexpr,
    LATENT: tl.constexpr, VALUES: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2)
    channel = tl.arange(0, LATENT)
    own = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    held = weight + head * weight_stride + own[:, None] * LATENT + channel[None, :]
    held = tl.load(held, mask=(own < value)[:, None], other=0.0)
    blocks = tl.cdiv(tl.load(lengths + row // query_tokens) - (query_tokens - 1 - row % query_tokens), BLOCK)
    count = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, SPLITS), 1))
    wait_for_earlier(DEPENDENT)
    largest, total = -1e30, 0.0
    joined = tl.zeros([LATENT], tl.float32)
    for begin in range(0, count, PIECES):
        piece = begin + tl.arange(0, PIECES)
        place = (row * SPLITS + piece).to(tl.int64) * heads + head
        sums = tl.load(log_sums + place, mask=piece < count, other=-1e30)
        found = pieces + place[:, None] * LATENT + channel[None, :]
        found = tl.load(found, mask=(piece < count)[:, None], other=0.0).to(tl.float32)
        higher = tl.maximum(largest, tl.max(sums, axis=0))
        shares = tl.exp2(sums - higher)
        joined = joined * tl.exp2(largest - higher) + tl.sum(found * shares[:, None], axis=0)
        total = total * tl.exp2(largest - higher) + tl.sum(shares, axis=0)
        largest = higher
    # Rounded as where a kernel of its own joins them.
    joined = (joined / total).to(held.dtype).to(tl.float32)
    product = tl.sum(held.to(tl.float32) * joined[None, :], axis=1)
    tl.store(out + (row * heads + head) * value + own, product.to(held.dtype), mask=own < value)


def takes(attended: Attended, weight: torch.Tensor) -> bool:
    """Whether there are pieces that it joins. weight: as in `expand_values`."""
    return isinstance(attended.pieces, EvenPieces) and weight.stride()[1:] == (1, attended.latents.shape[2])


def expand_pieces(attended: Attended, weight: torch.Tensor) -> torch.Tensor:
    """As `kernels.mla_projections.expand_values`, for what it `takes`."""
    pieces, (rows, heads, latent), value = attended.pieces, attended.latents.shape, weight.shape[2]
    assert isinstance(pieces, EvenPieces)
    out = attended.latents.new_empty(rows, heads, value)
    launch(_expand_pieces, (cdiv(value, VALUES), heads, rows), out.device,
        pieces.values, pieces.log_sums, pieces.lengths, weight, out, pieces.query_tokens, heads, value,
        weight.stride(0), pieces.splits, latent, VALUES, PIECES, BLOCK_TOKENS, num_warps=WARPS,
    )  # fmt: skip
    return out
