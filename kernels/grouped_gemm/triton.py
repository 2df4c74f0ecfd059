"""The experts' block-scaled linear layers in Triton."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import Quantized
from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.fp8_gemm.operands import BLOCK, BlockScaled
from kernels.fp8_gemm.tiles import Tiling, descriptor, product_tile, store_tile
from kernels.fp8_gemm.triton import ROW_GROUP
from kernels.moe_permute.layout import ContiguousLayout, Layout, MaskedLayout
from kernels.tile_sizes import cdiv, next_power_of_2


# A program computes a tile of one expert's outputs for some of its rows. Programs of the same outputs run side by side,
# so that the weight is read once. Reads outputs * inputs bytes for each expert that has a row.
@triton.jit
def _masked(
    x, x_scales, weight, weight_scales, out, counts, capacity, outputs, blocks, scale_stride,
    SWAPPED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    first_row, output = tl.program_id(0) * ROWS, tl.program_id(1) * OUTPUTS
    # Starts with the last experts: shared ones have most tiles, and if they started last they would run on alone.
    expert = tl.num_programs(2) - 1 - tl.program_id(2)
    # Waits even with nothing to do: a kernel that waits for this one relies on all earlier ones having ended.
    wait_for_earlier(DEPENDENT)
    rows = tl.load(counts + expert)
    if first_row >= rows:
        return
    first_output = expert * outputs + output
    x_scales += expert.to(tl.int64) * blocks * scale_stride
    total = product_tile(
        x, x_scales, weight, weight_scales + first_output // BLOCK * blocks, expert * capacity + first_row,
        tl.minimum(first_row + tl.arange(0, ROWS), rows - 1), first_output, 0, blocks, scale_stride, SWAPPED, ROWS,
        OUTPUTS, BLOCK, STAGES,
    )  # fmt: skip
    out += expert.to(tl.int64) * capacity * outputs
    store_tile(total, out, first_row, output, rows, outputs, SWAPPED, ROWS, OUTPUTS)


# A program computes a tile whose rows all belong to one expert, or are padding. 2 * rows * outputs * inputs operations.
@triton.jit
def _contiguous(
    x, x_scales, weight, weight_scales, out, row_experts, rows, outputs, blocks, scale_stride,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, ROW_GROUP: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, row_tiles, output_tiles = tl.program_id(0), rows // ROWS, outputs // OUTPUTS
    row_tile, output_tile = tl.swizzle2d(tile // output_tiles, tile % output_tiles, row_tiles, output_tiles, ROW_GROUP)
    first_row, output = row_tile * ROWS, output_tile * OUTPUTS
    expert = tl.load(row_experts + first_row)
    if expert < 0:
        return
    first_output = expert * outputs + output
    total = product_tile(
        x, x_scales, weight, weight_scales + first_output // BLOCK * blocks, first_row,
        first_row + tl.arange(0, ROWS), first_output, 0, blocks, scale_stride, False, ROWS, OUTPUTS, BLOCK, STAGES,
    )  # fmt: skip
    store_tile(total, out, first_row, output, rows, outputs, False, ROWS, OUTPUTS)


def grouped_fp8_gemm(x: Quantized, weight: BlockScaled, layout: Layout, tiling: Tiling | None = None) -> torch.Tensor:
    """Same as `kernels.grouped_gemm.grouped_fp8_gemm`. tiling: None chooses by the expected rows of an expert."""
    out = torch.empty(*layout.shape, weight.values.shape[1], dtype=torch.bfloat16, device=x.values.device)
    if not out.numel():
        return out
    if isinstance(layout, ContiguousLayout):
        _launch_contiguous(x, weight, layout, out, tiling or MANY_ROWS)
    else:
        _launch_masked(x, weight, layout, out, tiling or choose_tiling(layout.expected_rows))
    return out


MANY_ROWS = Tiling(rows=64, outputs=128, swapped=False, stages=3, warps=4)


def choose_tiling(expected_rows: int) -> Tiling:
    """Tiles that hold all rows of most experts if choices are even. A second tile finds the weight in the cache."""
    tile = min(max(next_power_of_2(round(expected_rows + 1.5 * expected_rows**0.5)), 16), 64)
    return Tiling(rows=tile, outputs=128, swapped=tile < 64, stages=5 if tile < 64 else 3, warps=4)


def _launch_masked(x: Quantized, weight: BlockScaled, layout: MaskedLayout, out: torch.Tensor, tiling: Tiling) -> None:
    experts, capacity, outputs = out.shape
    _masked[(cdiv(capacity, tiling.rows), outputs // tiling.outputs, experts)](
        descriptor(x.values, tiling.rows), x.scales, descriptor(weight.values, tiling.outputs), weight.scales, out,
        layout.counts, capacity, outputs, weight.values.shape[2] // BLOCK, x.scales.stride(2), tiling.swapped,
        tiling.rows, tiling.outputs, BLOCK, tiling.stages, num_warps=tiling.warps, **dependent_launch(out.device),
    )  # fmt: skip


def _launch_contiguous(
    x: Quantized, weight: BlockScaled, layout: ContiguousLayout, out: torch.Tensor, tiling: Tiling
) -> None:
    rows, outputs = out.shape
    _contiguous[(rows // tiling.rows * (outputs // tiling.outputs),)](
        descriptor(x.values, tiling.rows), x.scales, descriptor(weight.values, tiling.outputs), weight.scales, out,
        layout.row_experts, rows, outputs, weight.values.shape[2] // BLOCK, x.scales.stride(1), tiling.rows,
        tiling.outputs, ROW_GROUP, BLOCK, tiling.stages, num_warps=tiling.warps,
    )  # fmt: skip
