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
    form = x.dtype == weight.dtype == torch.bfloat16 and x.is_contiguous()
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    whole = outputs % 8 == 0 and inputs % ELEMENTS == 0 and weight.numel() <= MOST_WEIGHTS
    return form and aligned and whole and choose_tiling(outputs, inputs) is not None


def linear(x: torch.Tensor, weight: torch.Tensor, tiling: ClusterTiling | None = None) -> torch.Tensor:
    """As `kernels.linear.linear`, of what it `takes`. tiling: None chooses by the shape."""
    (tokens, inputs), outputs = x.shape, weight.shape[0]
    out = x.new_empty(tokens, outputs)
    tiling = tiling or choose_tiling(outputs, inputs)
    assert tiling is not None
    rows = next(rows for rows in ROWS if rows >= tokens)
    arguments = Arguments(
        weight=_boxes(weight.data_ptr(), outputs, inputs, tiling.outputs), x=_boxes(x.data_ptr(), tokens, inputs, rows),
        out=out.data_ptr(), rows=tokens, outputs=outputs, units=inputs // ELEMENTS,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"clusters_{rows}_{tiling.outputs}", x.device.index or 0)
    grid = (tiling.tiles(outputs) * tiling.ctas, 1, 1)
    kernel.launch(grid, THREADS[tiling.outputs], arguments, cluster=tiling.ctas, dependent=True)
    return out


@cache
def choose_tiling(outputs: int, inputs: int) -> ClusterTiling | None:
    """That with the most CTAs of those that an H200 runs all at once; None if there are too many tiles."""
    shared = [each for each in TILINGS if each.ctas <= inputs // ELEMENTS]
    fitting = [each for each in shared if each.tiles(outputs) <= MOST_CLUSTERS[each.ctas]]
    return max(fitting, key=lambda each: (each.tiles(outputs) * each.ctas, -each.ctas), default=None)


def _boxes(address: int, rows: int, inputs: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows, 2 * inputs, box_rows, LINE)
