"""Our block-scaled linear layer for one row on Hopper, in Triton: reads its weight while the kernels before it run."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import Quantized
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.fp8_gemm.operands import BLOCK, BlockScaled
from kernels.hopper import is_hopper
from kernels.tile_sizes import cdiv, next_power_of_2

# Bytes of weights of a program, which fill 64 registers of a thread, and its warps.
TILE_BYTES, WARPS = 1 << 15, 4
# Consecutive weights that a thread loads at once, and adds up before it scales them.
CHUNK = 16
# The largest layer for which this was measured: more weights than all registers hold would be read in turns.
MOST_BYTES, MOST_INPUTS = 12 << 20, 8192


# A program multiplies some outputs' weights, which it holds in registers before it waits, by the row. Reads a byte a
# weight once. What is left after the wait is the latency of one load, of a sum over the program's threads and of a
# store.
@triton.jit
def _one_row(
    x, x_scales, weight, weight_scales, out, outputs, inputs, x_scale_stride, OUTPUTS_TILE: tl.constexpr,
    INPUTS_TILE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    first = tl.program_id(0) * OUTPUTS_TILE
    output, column = first + tl.arange(0, OUTPUTS_TILE), tl.arange(0, INPUTS_TILE)
    inside, there = column < inputs, output < outputs
    block = tl.arange(0, INPUTS_TILE // CHUNK) * CHUNK // BLOCK
    listed = block * BLOCK < inputs
    own = weight + output[:, None].to(tl.int64) * inputs + column[None, :]
    held = tl.load(own, mask=there[:, None] & inside[None, :], other=0.0)
    # All outputs of a program lie in the same blocks.
    scales = tl.load(weight_scales + first // BLOCK * (inputs // BLOCK) + block, mask=listed, other=0.0)
    wait_for_earlier(DEPENDENT)
    values = tl.load(x + column, mask=inside, other=0.0)
    scales *= tl.load(x_scales + block * x_scale_stride, mask=listed, other=0.0)
    tl.store(out + output, scaled_product(held, values, scales, CHUNK).to(out.dtype.element_ty), mask=there)


@triton.jit
def scaled_product(weights, values, scales, CHUNK: tl.constexpr):
    """Rows of weights times a vector: [outputs] float32. scales: one for each CHUNK of inputs."""
    products = weights.to(tl.float32) * values.to(tl.float32)[None, :]
    chunks: tl.constexpr = weights.shape[1] // CHUNK
    sums = tl.sum(tl.reshape(products, [weights.shape[0], chunks, CHUNK]), axis=2)
    return tl.sum(sums * scales[None, :], axis=1)


def takes(rows: int, outputs: int, inputs: int) -> bool:
    """Whether there is one row, and a program holds whole rows of a weight that is small enough."""
    fits = inputs <= MOST_INPUTS and outputs * inputs <= MOST_BYTES
    return is_hopper() and rows == 1 and fits


def fp8_gemm(x: Quantized, weight: BlockScaled) -> torch.Tensor:
    """The product, for shapes that it `takes`."""
    outputs, inputs = weight.values.shape
    out = torch.empty(1, outputs, dtype=torch.bfloat16, device=x.values.device)
    padded = next_power_of_2(inputs)
    tile = min(TILE_BYTES // padded, BLOCK)
    launch(_one_row, (cdiv(outputs, tile),), out.device,
        x.values, x.scales, weight.values, weight.scales, out, outputs, inputs, x.scales.stride(1), tile, padded, BLOCK,
        CHUNK, num_warps=WARPS,
    )  # fmt: skip
    return out
