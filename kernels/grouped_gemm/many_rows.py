"""Experts' linear layers in bfloat16 for many rows on Hopper: `cuda/many_rows.cu`."""

from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.nvrtc import encode_halves, encode_rows, load_kernel
from kernels.structures import structure
from kernels.tile_sizes import cdiv

SOURCE = Path(__file__).parent / "cuda" / "many_rows.cu"
Arguments = structure(SOURCE, "Arguments")
# As in the source: rows of a weight's tile, bytes and rows of a copy of activations, CTAs of a cluster, threads of one.
LINES, INPUT_BYTES, BOX_ROWS, CTAS, THREADS = 128, 128, 32, 2, 384
MOST_GROUPS = 512
# From this many rows an expert on, if all are chosen equally often, it is faster than the kernel of few rows.
FEWEST_ROWS = 8
# The most rows of a tile where experts have up to FEW_ROWS on average, and where they have more. The first leaves room
# for more stages.
FEW_ROWS, TILE_ROWS = 136, (128, 256)


def takes(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether there are many rows, these and outputs can be copied 16 bytes at a time, and gated outputs in eights."""
    groups, outputs, inputs = weights.shape
    aligned = inputs % 8 == outputs % 16 == 0 and x.data_ptr() % 16 == weights.data_ptr() % 16 == 0
    contiguous = x.is_contiguous() and weights.is_contiguous()
    fits = FEWEST_ROWS * groups <= len(x) and groups <= MOST_GROUPS
    return is_hopper() and x.dtype == weights.dtype == torch.bfloat16 and fits and aligned and contiguous


def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    ends: torch.Tensor,
    *,
    gated: bool = False,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """As `kernels.grouped_gemm.grouped_gemm`, or, if gated, `grouped_swiglu`, for what it `takes`.

    tile_rows: one of TILE_ROWS; None chooses by the number of rows.
    """
    (rows, inputs), (groups, lines, _), device = x.shape, weights.shape, x.device
    outputs = lines // 2 if gated else lines
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    row_bytes = inputs * x.itemsize
    arguments = Arguments(
        x=encode_rows(x.data_ptr(), rows, row_bytes, BOX_ROWS, INPUT_BYTES),
        weight=encode_halves(weights.data_ptr(), groups, outputs, row_bytes)
        if gated
        else encode_rows(weights.data_ptr(), groups * outputs, row_bytes, LINES, INPUT_BYTES),
        out=out.data_ptr(), ends=ends.data_ptr(), groups=groups, outputs=outputs, blocks=cdiv(row_bytes, INPUT_BYTES),
    )  # fmt: skip
    tile_rows = tile_rows or TILE_ROWS[rows > FEW_ROWS * groups]
    kernel = load_kernel(SOURCE, f"{'gated_' if gated else ''}many_rows_{tile_rows}", device.index or 0)
    # A CTA fills a multiprocessor, and takes one tile after another.
    kernel.launch((processors(device) // CTAS * CTAS, 1, 1), THREADS, arguments, cluster=CTAS, dependent=True)
    return out
