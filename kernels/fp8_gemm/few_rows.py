"""Our block-scaled linear layer for few rows on Hopper, bound by the reading of its weight: `cuda/few_rows.cu`."""

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch

from kernels.act_quant.quantized import Quantized
from kernels.fp8_gemm.weight import BLOCK, BlockScaled
from kernels.hopper import is_hopper
from kernels.nvrtc import encode_rows, load_kernel

SOURCE = Path(__file__).parent / "cuda" / "few_rows.cu"
# Rows that a CTA is made for.
ROWS = (16, 32, 64, 96)
# A warpgroup's.
GROUP_OUTPUTS, GROUP_THREADS = 64, 128
# Warpgroups that take turns at a group of outputs, by the groups of a tile.
TURNS = {2: 2, 3: 1}
# Of a CTA: units of 128 inputs, and shared memory (`SHARED_BYTES` of the source).
MOST_UNITS, SHARED_BYTES = 80, 216_000
# How many clusters an H200 runs at once, by their CTAs, each of which fills a multiprocessor.
MOST_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 6: 17, 8: 15}


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: tiles of as many groups of 64 outputs, their inputs shared by as many CTAs."""

    groups: int
    ranks: int

    @property
    def threads(self) -> int:
        """Of a CTA: the warpgroups that multiply, and one that copies."""
        return (self.groups * TURNS[self.groups] + 1) * GROUP_THREADS

    def tiles(self, outputs: int) -> int:
        return -(-outputs // (self.groups * GROUP_OUTPUTS))


# In order of preference: narrow tiles, each shared by many.
CUTS = [Cut(groups, ranks) for groups in (2, 3) for ranks in sorted(MOST_CLUSTERS, reverse=True)]


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

    Alone on an H200 it is faster than deep_gemm, or within 1%, at all of DeepSeek-R1's layers up to 96 rows but 2048 to
    7168 from 48 rows on (8.2 us for 7.1); behind another kernel it has copied weights by the time that one ends.
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
        _boxes(weight.values.data_ptr(), outputs, inputs, cut.groups * GROUP_OUTPUTS),
        _boxes(x.values.data_ptr(), rows, inputs, held), x.scales.data_ptr(), weight.scales.data_ptr(), out.data_ptr(),
        rows, outputs, inputs // BLOCK, x.scales.stride(1),
    )  # fmt: skip
    kernel = load_kernel(SOURCE, f"few_rows_{held}_{cut.groups}", SHARED_BYTES, device.index or 0)
    grid = (cut.tiles(outputs) * cut.ranks, 1, 1)
    kernel.launch(grid, cut.threads, arguments, cluster=cut.ranks, dependent=True)
    return out


@cache
def choose_cut(outputs: int, inputs: int) -> Cut | None:
    """The first of `CUTS` all of which an H200 runs at once; None for weights that need more."""
    units = inputs // BLOCK
    fit = (cut for cut in CUTS if cut.tiles(outputs) <= MOST_CLUSTERS[cut.ranks])
    return next((cut for cut in fit if cut.ranks <= units <= cut.ranks * MOST_UNITS), None)


@lru_cache(maxsize=4096)
def _boxes(address: int, rows: int, inputs: int, box_rows: int) -> ctypes.Array[ctypes.c_uint64]:
    return encode_rows(address, rows=rows, row_bytes=inputs, box_rows=box_rows, box_bytes=BLOCK)
