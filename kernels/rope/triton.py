"""Rotation in Triton."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.tile_sizes import cdiv, next_power_of_2

HEADS = 32


@triton.jit
def rotate_pairs(first, second, cosine, sine):
    """Both values of each pair, rotated, float32."""
    return first * cosine - second * sine, first * sine + second * cosine


# A program does 32 heads of one row. It reads whole lines and splits their pairs. Reads 2 bytes a value, writes 2.
@triton.jit
def _rotate(
    x, rotations, out, heads, x_row, x_head, out_row, out_head,
    PAIRS: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, 2 * PADDED)
    inside = (head < heads)[:, None] & (column < 2 * PAIRS)[None, :]
    found = tl.load(x + row * x_row + head[:, None] * x_head + column[None, :], mask=inside, other=0.0)
    cosine, sine = split_pairs(
        tl.load(rotations + row * 2 * PAIRS + column, mask=column < 2 * PAIRS, other=0.0)[None, :]
    )
    first, second = split_pairs(found.to(tl.float32))
    turned = join_pairs(*rotate_pairs(first, second, cosine, sine))
    tl.store(out + row * out_row + head[:, None] * out_head + column[None, :], turned.to(found.dtype), mask=inside)


@triton.jit
def split_pairs(x):
    """[rows, 2 * pairs] to the first and the second values of the pairs, [rows, pairs] each."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def join_pairs(first, second):
    return tl.reshape(tl.join(first, second), [first.shape[0], first.shape[1] * 2])


def rotate(x: torch.Tensor, rotations: torch.Tensor, out: torch.Tensor) -> None:
    rows, heads, dim = x.shape
    if not rows or not heads:
        return
    pairs = dim // 2
    launch(_rotate, (rows, cdiv(heads, HEADS)), x.device,
        x, torch.view_as_real(rotations), out, heads, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        pairs, next_power_of_2(pairs), min(HEADS, next_power_of_2(heads)), num_warps=4,
    )  # fmt: skip
