"""Tiles of block-scaled products in Triton, for dense and grouped layers."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.fp8_gemm.operands import BLOCK


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is tiled, and how a program computes its tile."""

    # The size of a tile.
    rows: int
    outputs: int
    # Whether the tensor cores' 64 rows hold outputs, so that fewer than 64 rows of activations do not waste any.
    swapped: bool
    # Loads in flight.
    stages: int
    warps: int
    # Programs that share a tile; each computes a part of the inputs.
    splits: int = 1


def descriptor(values: torch.Tensor, rows: int) -> TensorDescriptor:
    """A tensor map of tiles [rows, 128] of a matrix, or of all experts' matrices one after the other; zeros outside."""
    return TensorDescriptor.from_tensor(values.flatten(0, -2), [rows, BLOCK])


@triton.jit
def product_tile(
    x, x_scales, weight, weight_scales, first_row, scale_rows, first_output, first_block, last_block, scale_stride,
    SWAPPED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The product over some blocks of 128 inputs: [ROWS, OUTPUTS] float32, or [OUTPUTS, ROWS] if operands are swapped.

    x, weight: descriptors; weight_scales: scales of the tile's outputs, which lie in one block; scale_rows: [ROWS]
    offsets of the rows' scales. The tensor cores compute a block's product, which is then scaled and summed in float32.
    """
    total = empty_tile(SWAPPED, ROWS, OUTPUTS)
    # With num_stages the loop also loads scales ahead. Without, it loads only operands, and products wait for scales.
    for block in tl.range(first_block, last_block, num_stages=STAGES):
        left = weight.load([first_output, block * BLOCK])
        right = x.load([first_row, block * BLOCK])
        of_rows = tl.load(x_scales + block * scale_stride + scale_rows)
        of_weight = tl.load(weight_scales + block)
        if SWAPPED:
            total += tl.dot(left, right.T) * (of_rows * of_weight)[None, :]
        else:
            total += tl.dot(right, left.T) * (of_rows * of_weight)[:, None]
    return total


@triton.jit
def empty_tile(SWAPPED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """A tile of zeros."""
    first: tl.constexpr = OUTPUTS if SWAPPED else ROWS
    second: tl.constexpr = ROWS if SWAPPED else OUTPUTS
    return tl.zeros([first, second], tl.float32)


@triton.jit
def store_tile(
    total, out, first_row, first_output, rows, outputs,
    SWAPPED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Store the part of the tile that lies within `out` [rows, outputs]."""
    row, output = (first_row + tl.arange(0, ROWS)).to(tl.int64), first_output + tl.arange(0, OUTPUTS)
    if SWAPPED:
        inside = (row[None, :] < rows) & (output[:, None] < outputs)
        tl.store(out + row[None, :] * outputs + output[:, None], total.to(tl.bfloat16), mask=inside)
    else:
        inside = (row[:, None] < rows) & (output[None, :] < outputs)
        tl.store(out + row[:, None] * outputs + output[None, :], total.to(tl.bfloat16), mask=inside)
