"""Our block-scaled linear layer for few rows on Hopper, bound by the reading of its weight: `cuda/few_rows.cu`."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.weight import BLOCK, BlockScaled
from kernels.hopper import is_hopper
from kernels.nvrtc import encode_rows, load_kernel

SOURCE = Path(__file__).parent / "cuda" / "few_rows.cu"
# Rows that a CTA is made for.
ROWS = (16, 32, 64, 96)
# Threads of a CTA, by the outputs of its tile: those of `Shape` in the source.
THREADS = {64: 640, 112: 640, 128: 640, 192: 512}
# Units of 128 inputs that a CTA has room for, as in the source.
MOST_UNITS = 80
# How many clusters an H200 runs at once, by their CTAs, each of which fills a multiprocessor.
MOST_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: tiles of as many outputs, their inputs shared by as many CTAs."""

    outputs: int
    ranks: int

    def tiles(self, outputs: int) -> int:
        return -(-outputs // self.outputs)


# In order of preference: of few outputs narrow tiles, which are multiplied in less time. More than four CTAs would take
# longer to add up a tile.
CUTS = [Cut(64, 3), Cut(112, 2), Cut(128, 4), Cut(128, 3), Cut(128, 2), Cut(192, 1)]
# Units of a CTA from which on 112 outputs pay: more multiprocessors read, a part of the tensor cores is idle.
LONG = 32


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
    """Whether it computes it, and is to.

    On an H200 it is faster than deep_gemm up to 96 rows, at those of DeepSeek-R1's layers that it can cut; behind
    another kernel it has copied weights by the time that one ends.
    """
    return is_hopper() and rows <= max(ROWS) and choose_cut(outputs, inputs) is not None


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
        _boxes(weight.values.data_ptr(), outputs, inputs, cut.outputs),
        _boxes(x.values.data_ptr(), rows, inputs, held), x.scales.data_ptr(), weight.scales.data_ptr(), out.data_ptr(),
        rows, outputs, inputs // BLOCK, x.scales.stride(1),
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"few_rows_{held}_{cut.outputs}", device.index or 0)
    grid = (cut.tiles(outputs) * cut.ranks, 1, 1)
    kernel.launch(grid, THREADS[cut.outputs], arguments, cluster=cut.ranks, dependent=True)
    return out


@cache
def choose_cut(outputs: int, inputs: int) -> Cut | None:
    """The first of `CUTS` all of which an H200 runs at once; None for weights that need more."""
    units = inputs // BLOCK
    for cut in CUTS:
        fewest = LONG if cut.outputs == 112 else 1
        if cut.tiles(outputs) <= MOST_CLUSTERS[cut.ranks] and fewest <= units / cut.ranks <= MOST_UNITS:
            return cut
    return None


def _boxes(address: int, rows: int, inputs: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows=rows, row_bytes=inputs, box_rows=box_rows, box_bytes=BLOCK)
