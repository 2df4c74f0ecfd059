"""Linear layers for a few rows on Hopper, in Triton. They read their weights while the kernels before them run."""

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.few_rows import are_few
from kernels.hopper import is_hopper
from kernels.tile_sizes import cdiv, next_power_of_2

# Weights of a program, which hold 64 registers of a thread, and its warps. Wider rows would take more.
TILE, WARPS = 1 << 14, 4
# The most weights of a layer for which this was measured.
MOST_WEIGHTS = 1 << 26


# A program multiplies some outputs' weights, which it holds in registers before it waits, by all rows. Reads 2 bytes a
# weight once, and each row once a program from the second-level cache. What is left after the wait is the latency of
# one load, of a sum over the program's threads and of a store.
@triton.jit
def _multiply_groups(
    x, weight, out, outputs, inputs, row_stride, group_stride, weight_stride, ROWS: tl.constexpr,
    OUTPUTS_TILE: tl.constexpr, INPUTS_TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    group = tl.program_id(1).to(tl.int64)
    output, column = tl.program_id(0) * OUTPUTS_TILE + tl.arange(0, OUTPUTS_TILE), tl.arange(0, INPUTS_TILE)
    inside, there = column < inputs, output < outputs
    own = weight + group * weight_stride + output[:, None].to(tl.int64) * inputs + column[None, :]
    held = tl.load(own, mask=there[:, None] & inside[None, :], other=0.0)
    wait_for_earlier(DEPENDENT)
    for row in tl.static_range(ROWS):
        values = tl.load(x + row * row_stride + group * group_stride + column, mask=inside, other=0.0)
        total = tl.sum(held.to(tl.float32) * values.to(tl.float32)[None, :], axis=1)
        target = out + (row * tl.num_programs(1) + group) * outputs + output
        tl.store(target, total.to(out.dtype.element_ty), mask=there)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are few rows, and a program holds whole rows of the weight: see `multiply_groups`."""
    held = (
        weight.shape[2] <= TILE
        and weight.numel() <= MOST_WEIGHTS
        and weight.stride()[1:] == (weight.shape[2], 1)
        and x.stride(2) == 1
    )
    return is_hopper() and x.dtype == weight.dtype == torch.bfloat16 and are_few(x) and held


def multiply_groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [rows, groups, inputs]; weight: [groups, outputs, inputs], each group's contiguous. Returns [rows, groups,
    outputs]: each group's rows times its transposed weight, summed in float32.
    """
    (rows, groups, inputs), outputs = x.shape, weight.shape[1]
    out = x.new_empty(rows, groups, outputs)
    padded = next_power_of_2(inputs)
    tile = max(TILE // padded, 1)
    launch(_multiply_groups, (cdiv(outputs, tile), groups), x.device,
        x, weight, out, outputs, inputs, x.stride(0), x.stride(1), weight.stride(0), rows, tile, padded,
        num_warps=WARPS,
    )  # fmt: skip
    return out
