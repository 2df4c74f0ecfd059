"""Our block-scaled products of many rows on Hopper: `cuda/many_rows.cu`."""

from functools import lru_cache
from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.operands import BLOCK, BlockScaled
from kernels.hopper import is_hopper, processors
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure

SOURCE = Path(__file__).parent / "cuda" / "many_rows.cu"
Arguments = structure(SOURCE, "Arguments")
# Rows of a tile, CTAs of a cluster, and threads of a CTA, as in the source.
ROWS, CTAS, THREADS = 128, 2, 384
# Rows of a copy of activations or outputs.
BOX_ROWS = ROWS // CTAS
# Microseconds in which a CTA multiplies a block of 128 inputs for its tile, by the tile's outputs, as measured.
BLOCK_TIMES = {64: 0.33, 128: 0.41, 256: 0.72}
# Tiles of this many outputs lie one below the other in a cluster, others side by side.
WIDEST = 256
# With fewer CTAs than this, those of our Triton kernel, which can share a tile, are faster.
FEWEST_CTAS = 96
# How many rows of clusters have their tiles taken together. Sorted rows change their weight every so often.
ROWS_TOGETHER, SORTED_ROWS_TOGETHER = 8, 4


def takes(rows: int, outputs: int) -> bool:
    """Whether the kernel should compute a linear layer: on Hopper, with tiles for most of the chip."""
    return is_hopper() and _ctas(rows, outputs, min(BLOCK_TIMES)) >= FEWEST_CTAS


def fp8_gemm(x: Quantized, weight: BlockScaled, width: int | None = None) -> torch.Tensor:
    """Same as `kernels.fp8_gemm.fp8_gemm`, on Hopper. width: a tile's outputs; None chooses by the shape."""
    width = width or choose_width(x.values.shape[0], weight.values.shape[0], processors(x.values.device))
    return _multiply(x, weight, width, f"many_rows_{width}", ROWS_TOGETHER)


def sorted_fp8_gemm(x: Quantized, weight: BlockScaled, row_experts: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its expert's weight transposed, on Hopper.

    x: [rows, inputs]; weight: [experts, outputs, inputs]; row_experts: [rows] int32, ascending, each expert's first
    row a multiple of 128, less than 0 for padding. Returns [rows, outputs] bfloat16, undefined for padding.
    """
    return _multiply(x, weight, WIDEST, f"sorted_rows_{WIDEST}", SORTED_ROWS_TOGETHER, row_experts)


# Layers of a step ask for the same few shapes.
@lru_cache(maxsize=4096)
def choose_width(rows: int, outputs: int, at_once: int) -> int:
    """The outputs of a tile with which it takes least time to compute all tiles, those of one CTA one after another.
    at_once: CTAs that run at a time, each on a multiprocessor of its own.
    """

    def time(width: int) -> float:
        return -(-_ctas(rows, outputs, width) // at_once) * BLOCK_TIMES[width]

    return min(BLOCK_TIMES, key=time)


def _multiply(
    x: Quantized, weight: BlockScaled, width: int, name: str, together: int, row_experts: torch.Tensor | None = None
) -> torch.Tensor:
    rows, inputs = x.values.shape
    outputs, device = weight.values.shape[-2], x.values.device
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=device)
    if not rows:
        return out
    arguments = Arguments(
        x=encode_rows(x.values.data_ptr(), rows, inputs, BOX_ROWS, BLOCK),
        weight=encode_rows(
            weight.values.data_ptr(), weight.values.numel() // inputs, inputs, min(width, BLOCK), BLOCK
        ),
        out=encode_rows(out.data_ptr(), rows, 2 * outputs, BOX_ROWS, BLOCK),
        x_scales=x.scales.data_ptr(), weight_scales=weight.scales.data_ptr(),
        row_experts=None if row_experts is None else row_experts.data_ptr(),
        rows=rows, outputs=outputs, blocks=inputs // BLOCK, scale_stride=x.scales.stride(1), rows_together=together,
    )  # fmt: skip
    kernel = load_kernel(SOURCE, name, device.index or 0)
    grid = (min(_ctas(rows, outputs, width), processors(device) // CTAS * CTAS), 1, 1)
    kernel.launch(grid, THREADS, arguments, cluster=CTAS, dependent=True)
    return out


@lru_cache(maxsize=4096)
def _ctas(rows: int, outputs: int, width: int) -> int:
    """How many CTAs there are if each has one tile, in whole clusters."""
    down, across = (CTAS, 1) if width == WIDEST else (1, CTAS)
    return -(-rows // (down * ROWS)) * -(-outputs // (across * width)) * CTAS
