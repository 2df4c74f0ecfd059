"""Experts' linear layers in bfloat16 for few rows, in Triton: the weights' bytes limit them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.moe_permute.layout import HEADER, PLAN_WIDTH, ListedRows
from kernels.tile_sizes import cdiv, next_power_of_2

# Up to this many rows an expert, if all are chosen equally often, reading the weights takes longer than the products.
MOST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Tiling:
    """The rows, outputs and inputs of a tile, and how many tiles of weights are under way."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


# A program computes some outputs of one group that has rows, for all of its rows, a tile of rows after another: the
# weights of later tiles come from the cache. Weights are the first operand, so that tiles of 16 rows waste nothing.
# GATED: the outputs are those of SwiGLU, and a tile has half of its weights from the gate and half from the other half.
# LISTED: a plan (`ListedRows`) says which rows a group has, instead of `ends`; those of the first product are tokens.
# Reads 2 bytes a weight of groups with rows, and writes 2 an output.
@triton.jit(do_not_specialize=["rows"])
def _few_rows_of_groups(
    x, weights, ends, out, rows, outputs, inputs,
    GROUPS: tl.constexpr, GROUPS_TILE: tl.constexpr, GATED: tl.constexpr, LISTED: tl.constexpr,
    PLAN_WIDTH: tl.constexpr, HEADER: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    # The tile's weights: OUTPUTS rows of the matrix, half of them `outputs` further on if they are gated.
    SINGLE: tl.constexpr = OUTPUTS // 2 if GATED else OUTPUTS
    line = tl.arange(0, OUTPUTS)
    output = tl.program_id(0) * SINGLE + line % SINGLE
    tile_row = (output + line // SINGLE * outputs).to(tl.int64) * inputs
    matrix_size = outputs * (2 if GATED else 1) * inputs
    entry = ends + tl.program_id(1) * PLAN_WIDTH
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    if LISTED:
        group, start, stop = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        if stop == start:
            return
    else:
        listed = tl.arange(0, GROUPS_TILE)
        stops = tl.load(ends + listed, mask=listed < GROUPS, other=0)
        starts = tl.load(ends + listed - 1, mask=(listed > 0) & (listed < GROUPS), other=0)
        used = (stops > starts) & (listed < GROUPS)
        # The n-th group from the end of those with rows. Shared experts are last and have most rows: if they
        # started last, they would run on alone.
        place = tl.cumsum(used.to(tl.int32), axis=0)
        mine = used & (tl.sum(used.to(tl.int32)) - place == tl.program_id(1))
        if tl.sum(mine.to(tl.int32)) == 0:
            return
        group = tl.sum(tl.where(mine, listed, 0))
        start, stop = tl.sum(tl.where(mine, starts, 0)), tl.sum(tl.where(mine, stops, 0))
    weight_row = (weights + group.to(tl.int64) * matrix_size + tile_row)[:, None]
    there = (output < outputs)[:, None]
    column = tl.arange(0, INPUTS)
    for first in range(0, stop - start, ROWS):
        index = first + tl.arange(0, ROWS)
        row = start + index
        known = (row < stop)[None, :]
        # Not masked: then it does not wait for the number of rows.
        source = tl.load(entry + HEADER + index) if LISTED and GATED else row
        row_start = x + source[None, :].to(tl.int64) * inputs
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for at in tl.range(0, inputs, INPUTS, num_stages=STAGES):
            inside = at + column < inputs
            left = tl.load(weight_row + (at + column)[None, :], mask=there & inside[None, :], other=0.0)
            right = tl.load(row_start + (at + column)[:, None], mask=known & inside[:, None], other=0.0)
            total = tl.dot(left, right, total)
        if GATED:
            gate, up = tl.split(tl.permute(total.reshape(2, SINGLE, ROWS), 1, 2, 0))
            total = gate * tl.sigmoid(gate) * up
        target = tl.program_id(0) * SINGLE + tl.arange(0, SINGLE)
        written = out + row[None, :].to(tl.int64) * outputs + target[:, None]
        tl.store(written, total.to(out.dtype.element_ty), mask=known & (target < outputs)[:, None])


def takes(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether these rows are few."""
    return x.dtype == torch.bfloat16 and x.shape[0] <= MOST_ROWS * weights.shape[0]


def choose_tiling(rows: int, groups: int) -> Tiling:
    """Tiles that hold all rows of most groups, if some are chosen four times as often as others."""
    expected = next_power_of_2(cdiv(rows, groups))
    return Tiling(rows=min(max(4 * expected, 16), 64), outputs=64, inputs=128, stages=4, warps=4)


def grouped_gemm(
    x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor, *, gated: bool = False, tiling: Tiling | None = None
) -> torch.Tensor:
    """As `kernels.grouped_gemm.grouped_gemm`, or, if gated, `grouped_swiglu`."""
    (rows, inputs), groups = x.shape, weights.shape[0]
    outputs = weights.shape[1] // (2 if gated else 1)
    out = x.new_empty(rows, outputs)
    if rows:
        tiling = tiling or choose_tiling(rows, groups)
        tiles = cdiv(outputs, tiling.outputs // (2 if gated else 1))
        launch(_few_rows_of_groups, (tiles, min(rows, groups)), x.device,
            x, weights, ends, out, rows, outputs, inputs, groups, next_power_of_2(groups), gated, False, 0, 0,
            tiling.rows, tiling.outputs, tiling.inputs, tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
    return out


def listed_feed_forward(x: torch.Tensor, listed: ListedRows, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As `kernels.grouped_gemm.listed_feed_forward`."""
    return _listed(_listed(x, listed, gate_up, gated=True), listed, down, gated=False)


def _listed(x: torch.Tensor, listed: ListedRows, weights: torch.Tensor, *, gated: bool) -> torch.Tensor:
    rows, (groups, outputs, inputs) = listed.positions.numel(), weights.shape
    outputs //= 2 if gated else 1
    out, tiling = x.new_empty(rows, outputs), choose_tiling(rows, groups)
    tiles = cdiv(outputs, tiling.outputs // (2 if gated else 1))
    launch(_few_rows_of_groups, (tiles, min(rows, groups)), x.device,
        x, weights, listed.plan, out, rows, outputs, inputs, groups, 1, gated, True, PLAN_WIDTH,
        HEADER, tiling.rows, tiling.outputs, tiling.inputs, tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
    return out
