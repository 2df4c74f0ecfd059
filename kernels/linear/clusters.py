"""Linear layers for few tokens on Hopper, whose inputs the CTAs of a cluster share: `cuda/clusters.cu`."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from kernels.few_rows import MOST_ROWS
from kernels.hopper import MOST_CLUSTERS, ClusterTiling, is_hopper
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "clusters.cu"
Arguments = structure(SOURCE, "Arguments")
# Numbers of tokens that kernels are compiled for.
ROWS = (16, 32, 64)
# As in the source: elements and bytes of a unit's rows.
ELEMENTS, LINE = 64, 128
# Shared memory: of a CTA at most; bytes of 8 tokens' sums for 16 outputs, and of the rest but stages.
SHARED_BYTES, PIECE_BYTES, OTHER_BYTES = 216_000, 512, 3072
# A CTA with more units than the first has no more stages than the second: with ten of GLM-4.7-Flash's output a step of
# 16 requests took 0.5% longer, since CTAs of the kernel before had no room next to them.
MOST_HELD, REUSED_STAGES = 12, 8
# Threads of a CTA by the outputs of its tile, as in `Shape` of the source.
THREADS = {64: 160, 128: 288}


# The most weights of a layer for which this was measured.
MOST_WEIGHTS = 1 << 25
TILINGS = [ClusterTiling(outputs, ctas) for outputs in (64, 128) for ctas in MOST_CLUSTERS]


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether there are few tokens, all CTAs run at once, and the copy engine can read both."""
    if not MOST_ROWS < x.shape[0] <= max(ROWS) or not is_hopper():
        return False
    outputs, inputs = weight.shape
    form = x.dtype == weight.dtype == torch.bfloat16 and x.stride(1) == 1
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0
    whole = outputs % 8 == 0 and inputs % ELEMENTS == 0 and weight.numel() <= MOST_WEIGHTS
    return form and aligned and whole and choose_tiling(outputs, inputs) is not None


def linear(x: torch.Tensor, weight: torch.Tensor, tiling: ClusterTiling | None = None) -> torch.Tensor:
    """As `kernels.linear.linear`, of what it `takes`. tiling: None chooses by the shape."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(tokens, outputs)
    tiling = tiling or choose_tiling(outputs, inputs)
    assert tiling is not None
    rows = _rows(x)
    arguments = Arguments(
        weight=_boxes(weight.data_ptr(), outputs, inputs, tiling.outputs),
        x=_boxes(x.data_ptr(), tokens, x.stride(0), rows), out=out.data_ptr(), rows=tokens, outputs=outputs,
        units=inputs // ELEMENTS,
    )  # fmt: skip
    arguments.stages, shared_bytes = stages_of(tiling, inputs, rows)
    kernel = load_kernel(SOURCE, f"clusters_{rows}_{tiling.outputs}", x.device.index or 0)
    grid, threads = (tiling.tiles(outputs) * tiling.ctas, 1, 1), THREADS[tiling.outputs]
    kernel.launch(grid, threads, arguments, cluster=tiling.ctas, dependent=True, shared_bytes=shared_bytes)
    return out


@cache
def stages_of(tiling: ClusterTiling, inputs: int, rows: int) -> tuple[int, int]:
    """Stages of a CTA, no more than it has units, and its bytes of shared memory."""
    stage = (tiling.outputs + rows) * LINE
    pieces = rows // 8 * tiling.outputs // 16
    others = (pieces + max(MOST_CLUSTERS) - 1) * PIECE_BYTES + OTHER_BYTES
    units = -(-inputs // (ELEMENTS * tiling.ctas))
    stages = min(units if units <= MOST_HELD else REUSED_STAGES, (SHARED_BYTES - others) // stage)
    return stages, stages * stage + others


@cache
def choose_tiling(outputs: int, inputs: int) -> ClusterTiling | None:
    """That with the most CTAs of those that an H200 runs all at once; None if there are too many tiles. Of equal ones
    that without clusters, or else that with the wider tile.
    """
    shared = [each for each in TILINGS if each.ctas <= inputs // ELEMENTS]
    fitting = [each for each in shared if each.tiles(outputs) <= MOST_CLUSTERS[each.ctas]]
    return max(fitting, key=lambda each: (each.tiles(outputs) * each.ctas, each.ctas == 1, each.outputs), default=None)


def _rows(x: torch.Tensor) -> int:
    """The tokens of a tile."""
    return next(rows for rows in ROWS if rows >= len(x))


def _boxes(address: int, rows: int, stride: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows, 2 * stride, box_rows, LINE)
