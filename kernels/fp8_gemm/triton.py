"""Block-scaled linear layers in Triton."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import Quantized
from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier
from kernels.fp8_gemm.operands import BLOCK, MOST_SHARED_TILES, BlockScaled, Workspace
from kernels.fp8_gemm.tiles import Tiling, descriptor, empty_tile, product_tile, store_tile
from kernels.tile_sizes import cdiv, next_power_of_2

# How many tiles of rows run side by side, so that they share the weight's tiles in the cache.
ROW_GROUP = 8
# Two tiles for each multiprocessor of an H200, on which the tilings were measured.
CHIP_TILES = 264
LARGE_BYTES = 32 << 20
# At most this many blocks of 128 inputs: as many as latents have. Latents are multiplied for as many rows as there are
# keys, any number, and a tiling that depends on that number would be compiled while requests wait.
SHORT_BLOCKS = 4


# A program computes a tile or a part of one. The last of the programs that share a tile adds up the parts. With few
# rows the time is that of reading outputs * inputs bytes, with many rows that of 2 * rows * outputs * inputs
# operations.
@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _dense(
    x, x_scales, weight, weight_scales, out, parts, arrivals, rows, outputs, blocks, scale_stride,
    SPLITS: tl.constexpr, SWAPPED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, ROW_GROUP: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    tile, split = tl.program_id(0), tl.program_id(1)
    row_tiles, output_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, OUTPUTS)
    row_tile, output_tile = tl.swizzle2d(tile // output_tiles, tile % output_tiles, row_tiles, output_tiles, ROW_GROUP)
    first_row, first_output = row_tile * ROWS, output_tile * OUTPUTS
    first_block, last_block = split * blocks // SPLITS, (split + 1) * blocks // SPLITS
    # Wait before loading activations, and before storing where an earlier kernel may still read.
    wait_for_earlier(DEPENDENT)
    total = product_tile(
        x, x_scales, weight, weight_scales + first_output // BLOCK * blocks, first_row,
        tl.minimum(first_row + tl.arange(0, ROWS), rows - 1), first_output, first_block, last_block,
        scale_stride, SWAPPED, ROWS, OUTPUTS, BLOCK, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        # A part has the tile's own shape, so that its elements are contiguous.
        places = tl.arange(0, total.shape[0])[:, None] * total.shape[1] + tl.arange(0, total.shape[1])[None, :]
        parts += tile * SPLITS * (ROWS * OUTPUTS) + places
        tl.store(parts + split * (ROWS * OUTPUTS), total)
        # All threads must have written their part before one of them reports it.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        # Adds in a fixed order, so that the sum does not depend on which program came last.
        total = empty_tile(SWAPPED, ROWS, OUTPUTS)
        for part in range(SPLITS):
            total += tl.load(parts + part * (ROWS * OUTPUTS), cache_modifier=".cg")
        tl.store(arrivals + tile, 0)
    store_tile(total, out, first_row, first_output, rows, outputs, SWAPPED, ROWS, OUTPUTS)


def fp8_gemm(x: Quantized, weight: BlockScaled, workspace: Workspace, tiling: Tiling | None = None) -> torch.Tensor:
    """Same as `kernels.fp8_gemm.fp8_gemm`. tiling: None chooses by the shape."""
    rows, (outputs, inputs) = x.values.shape[0], weight.values.shape
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.values.device)
    if not rows:
        return out
    tiling = tiling or choose_tiling(rows, outputs, inputs)
    tiles = cdiv(rows, tiling.rows) * cdiv(outputs, tiling.outputs)
    parts = None
    if tiling.splits > 1:
        assert tiles <= MOST_SHARED_TILES
        shape = (tiles, tiling.splits, tiling.rows, tiling.outputs)
        parts = torch.empty(shape, dtype=torch.float32, device=out.device)
    _dense[(tiles, tiling.splits)](
        descriptor(x.values, tiling.rows), x.scales, descriptor(weight.values, tiling.outputs), weight.scales, out,
        parts, workspace.arrivals, rows, outputs, inputs // BLOCK, x.scales.stride(1), tiling.splits, tiling.swapped,
        tiling.rows, tiling.outputs, ROW_GROUP, BLOCK, tiling.stages, num_warps=tiling.warps,
        **dependent_launch(out.device),
    )  # fmt: skip
    return out


def choose_tiling(rows: int, outputs: int, inputs: int) -> Tiling:
    """The tiling measured to be fastest on an H200 at the shapes of DeepSeek-R1. Up to 64 rows read a weight once.

    Tiles are wide if there are enough of them to fill the chip twice, or if many rows share a large weight. Otherwise
    they are narrow. A few tiles are split into enough parts for loads in flight, and no more: parts must be added up.
    """
    blocks, tile = inputs // BLOCK, min(max(next_power_of_2(rows), 16), 64)
    swapped, row_tiles = tile < 64, cdiv(rows, tile)
    wide, narrow = (row_tiles * cdiv(outputs, width) for width in (128, 64))
    if wide >= CHIP_TILES or (rows > 64 and blocks <= SHORT_BLOCKS):
        return Tiling(rows=tile, outputs=128, swapped=swapped, stages=3, warps=4)
    if rows > 64 and outputs * inputs >= LARGE_BYTES:
        splits = _splits(192, wide, blocks // 14)
        return Tiling(rows=tile, outputs=128, swapped=False, stages=4, warps=4, splits=splits)
    if swapped:
        splits = _splits(256, narrow, blocks // 7)
        return Tiling(rows=tile, outputs=64, swapped=True, stages=4, warps=4, splits=splits)
    stages = 5 if narrow <= CHIP_TILES else 4
    splits = _splits(192, narrow, blocks // 14)
    return Tiling(rows=tile, outputs=64, swapped=False, stages=stages, warps=4, splits=splits)


def _splits(programs: int, tiles: int, most: int) -> int:
    """Parts of a tile that give this number of programs, but at most `most`."""
    return max(min(-(-programs // tiles), most), 1)
