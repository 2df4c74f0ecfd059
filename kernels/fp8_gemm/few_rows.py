"""Our block-scaled linear layer for few rows on Hopper. Its time is that of reading the weight: `cuda/few_rows.cu`."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.operands import BLOCK, BlockScaled
from kernels.hopper import MOST_CLUSTERS, ClusterTiling, is_hopper
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "few_rows.cu"
Arguments = structure(SOURCE, "Arguments")
# Numbers of rows that kernels are compiled for.
ROWS = (16, 32, 64, 96)
# Threads of a CTA by the outputs of its tile, as in `Shape` of the source.
THREADS = {64: 640, 112: 640, 128: 640, 192: 512}
# Units of 128 inputs that a CTA has room for, as in the source.
MOST_UNITS = 80


# A tiling whose CTAs need not run at once: for weights of more tiles than an H200 has room for, and while
# other kernels run.
ALONE = ClusterTiling(192, 1)
# Tilings while other kernels run: the narrowest of these with at most this many tiles, which find room.
SHARING, MOST_SHARING = (ClusterTiling(64, 1), ClusterTiling(128, 1)), 24
# In order of preference: narrow tiles for few outputs, since they are multiplied in less time. More than four CTAs
# would take longer to add up a tile.
TILINGS = [
    ClusterTiling(64, 3),
    ClusterTiling(112, 2),
    ClusterTiling(128, 4),
    ClusterTiling(128, 3),
    ClusterTiling(128, 2),
    ALONE,
]
# Tiles of 112 outputs pay from this many units a CTA on: more multiprocessors read, but some of the tensor cores idle.
LONG = 32


def takes(rows: int, outputs: int, inputs: int) -> bool:
    """Whether the kernel supports this product and should compute it.

    On an H200 it is faster than deep_gemm up to 96 rows for those of DeepSeek-R1's layers that it can tile. After
    another kernel it has already copied weights when that kernel ends.
    """
    return is_hopper() and rows <= max(ROWS) and choose_tiling(outputs, inputs) is not None


def fp8_gemm(x: Quantized, weight: BlockScaled, tiling: ClusterTiling | None = None) -> torch.Tensor:
    """The product, for shapes that it `takes`. tiling: None chooses by the shape."""
    rows, (outputs, inputs) = x.values.shape[0], weight.values.shape
    device = x.values.device
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=device)
    if not rows:
        return out
    tile_rows = next(size for size in ROWS if size >= rows)
    tiling = tiling or choose_tiling(outputs, inputs)
    assert tiling is not None
    arguments = Arguments(
        weight=_boxes(weight.values.data_ptr(), outputs, inputs, tiling.outputs),
        x=_boxes(x.values.data_ptr(), rows, inputs, tile_rows),
        x_scales=x.scales.data_ptr(), weight_scales=weight.scales.data_ptr(), out=out.data_ptr(),
        rows=rows, outputs=outputs, units=inputs // BLOCK, scale_stride=x.scales.stride(1),
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"few_rows_{tile_rows}_{tiling.outputs}", device.index or 0)
    grid = (tiling.tiles(outputs) * tiling.ctas, 1, 1)
    kernel.launch(grid, THREADS[tiling.outputs], arguments, cluster=tiling.ctas, dependent=True)
    return out


@cache
def choose_tiling(outputs: int, inputs: int, *, shares_chip: bool = False) -> ClusterTiling | None:
    """The first of `TILINGS` whose CTAs an H200 runs all at once, else `ALONE`; None if there are too many inputs.

    shares_chip: whether only few CTAs find room at once, see `Workspace`.
    """
    units = inputs // BLOCK
    if shares_chip and units <= MOST_UNITS:
        return next((tiling for tiling in SHARING if tiling.tiles(outputs) <= MOST_SHARING), ALONE)
    for tiling in TILINGS:
        fewest = LONG if tiling.outputs == 112 else 1
        if tiling.tiles(outputs) <= MOST_CLUSTERS[tiling.ctas] and fewest <= units / tiling.ctas <= MOST_UNITS:
            return tiling
    return ALONE if units <= MOST_UNITS else None


def _boxes(address: int, rows: int, inputs: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows, inputs, box_rows, BLOCK)
