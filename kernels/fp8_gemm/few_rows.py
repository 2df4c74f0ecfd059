"""Our block-scaled linear layer for few rows on Hopper, bound by the reading of its weight: `cuda/few_rows.cu`."""

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.weight import BLOCK, BlockScaled
from kernels.hopper import is_hopper
from kernels.nvrtc import CudaKernel, encode_rows, load_kernel

SOURCE = Path(__file__).parent / "cuda" / "few_rows.cu"
# Rows that a CTA is made for.
ROWS = (16, 32, 64, 96)
# Up to here faster than others, further on for large weights only.
FEWEST_ROWS, LARGE_BYTES = 32, 30_000_000
# A warpgroup's.
GROUP_OUTPUTS, GROUP_THREADS = 64, 128
# Of a CTA.
MOST_UNITS = 64
# Of the chip that it is made for.
MULTIPROCESSORS, CLUSTERED = 132, 112


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: tiles of as many warpgroups' outputs, their inputs shared by as many CTAs."""

    groups: int
    ranks: int

    def tiles(self, outputs: int) -> int:
        return -(-outputs // (self.groups * GROUP_OUTPUTS))


# Wide tiles first.
CUTS = [Cut(groups, ranks) for groups in (4, 3) for ranks in (8, 4, 2, 1)]


class Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("weight", ctypes.c_uint64 * 16),
        ("x", ctypes.c_uint64 * 16),
        ("x_scales", ctypes.c_void_p),
        ("weight_scales", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("units", ctypes.c_int),
        ("scale_stride", ctypes.c_int),
        # To a multiple of the maps' alignment, 64.
        ("padding", ctypes.c_byte * 24),
    )


def takes(rows: int, outputs: int, inputs: int) -> bool:
    return is_hopper() and rows <= max(ROWS) and choose_cut(outputs, inputs) is not None


def is_faster(rows: int, outputs: int, inputs: int) -> bool:
    """Whether it takes the product, and is faster than others in a decode step, as measured on an H200."""
    return takes(rows, outputs, inputs) and (rows <= FEWEST_ROWS or outputs * inputs >= LARGE_BYTES)


def fp8_gemm(x: Quantized, weight: BlockScaled, cut: Cut | None = None) -> torch.Tensor:
    """For what it `takes`. cut: None chooses by the shape."""
    rows, (outputs, inputs) = x.values.shape[0], weight.values.shape
    device = x.values.device
    out = torch.empty(rows, outputs, dtype=torch.bfloat16, device=device)
    if not rows:
        return out
    held = next(held for held in ROWS if held >= rows)
    cut = cut or choose_cut(outputs, inputs)
    assert cut is not None
    arguments = Arguments(
        _boxes(weight.values.data_ptr(), outputs, inputs, cut.groups * GROUP_OUTPUTS),
        _boxes(x.values.data_ptr(), rows, inputs, held), x.scales.data_ptr(), weight.scales.data_ptr(), out.data_ptr(),
        rows, outputs, inputs // BLOCK, x.scales.stride(1),
    )  # fmt: skip
    kernel, grid = _kernel(held, cut.groups, device.index or 0), (cut.tiles(outputs) * cut.ranks, 1, 1)
    kernel.launch(grid, cut.groups * GROUP_THREADS, arguments, cluster=cut.ranks, dependent=True)
    return out


@cache
def choose_cut(outputs: int, inputs: int) -> Cut | None:
    """The most CTAs that an H200 runs at once, one on each multiprocessor; None for weights that need more."""
    units = inputs // BLOCK
    fit = [cut for cut in CUTS if _resident(cut, outputs) and cut.ranks <= units <= cut.ranks * MOST_UNITS]
    return max(fit, key=lambda cut: cut.tiles(outputs) * cut.ranks, default=None)


def _resident(cut: Cut, outputs: int) -> bool:
    # The CTAs of a cluster lie in one part of the chip, so that of clusters fewer fit.
    most = MULTIPROCESSORS if cut.ranks == 1 else CLUSTERED
    return cut.tiles(outputs) * cut.ranks <= most


@lru_cache(maxsize=4096)
def _boxes(address: int, rows: int, inputs: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows=rows, row_bytes=inputs, box_rows=box_rows, box_bytes=BLOCK)


def _kernel(held: int, groups: int, device: int) -> CudaKernel:
    # `Shape` of the source.
    weights = 7 if groups == 3 else 6 if held <= 32 else 5
    activations = 6 if held <= 64 else 4
    # `Shared` of the source: both rings with the activations' scales, the weight's scales, the stages' barriers.
    rings = weights * groups * GROUP_OUTPUTS * BLOCK + activations * held * (BLOCK + 4)
    shared = rings + groups * MOST_UNITS * 4 + (2 * weights + activations) * 8
    return load_kernel(SOURCE, f"few_rows_{held}_{groups}", shared, device)
