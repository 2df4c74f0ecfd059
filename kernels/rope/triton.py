"""Rotation in Triton."""

import torch
import triton
import triton.language as tl

HEADS = 32


@triton.jit
def rotate_pairs(first, second, cosine, sine):
    """Both of each pair, float32, turned."""
    return first * cosine - second * sine, first * sine + second * cosine


# A program does 32 heads of one row. Reads 2 bytes a value, writes 2.
@triton.jit
def _rotate(
    x, rotations, out, heads, x_row, x_head, out_row, out_head,
    PAIRS: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PADDED)
    inside = (head < heads)[:, None] & (pair < PAIRS)[None, :]
    cosine = tl.load(rotations + (row * PAIRS + pair) * 2, mask=pair < PAIRS, other=0.0)
    sine = tl.load(rotations + (row * PAIRS + pair) * 2 + 1, mask=pair < PAIRS, other=0.0)
    source = x + row * x_row + head[:, None] * x_head + 2 * pair[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + 1, mask=inside, other=0.0).to(tl.float32)
    first, second = rotate_pairs(first, second, cosine[None, :], sine[None, :])
    target = out + row * out_row + head[:, None] * out_head + 2 * pair[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=inside)
    tl.store(target + 1, second.to(out.dtype.element_ty), mask=inside)


def rotate(x: torch.Tensor, rotations: torch.Tensor, out: torch.Tensor) -> None:
    rows, heads, dim = x.shape
    if not rows or not heads:
        return
    pairs = dim // 2
    _rotate[(rows, triton.cdiv(heads, HEADS))](
        x, torch.view_as_real(rotations), out, heads, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
        pairs, triton.next_power_of_2(pairs), min(HEADS, triton.next_power_of_2(heads)), num_warps=4,
    )  # fmt: skip
