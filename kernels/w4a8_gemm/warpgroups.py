"""Our product for Hopper: `cuda/w4a8.cu`."""

import ctypes
from functools import cache
from math import prod
from pathlib import Path

import torch

from kernels.hopper import is_hopper
from kernels.moe_permute.layout import ContiguousLayout, Layout
from kernels.nvrtc import encode_rows, load_kernel
from kernels.w4a8_gemm.activations import ScaledRows
from kernels.w4a8_gemm.tiling import TILINGS, Tiling
from kernels.w4a8_gemm.weight import GROUP, TILE_OUTPUTS, Int4Experts

SOURCE = Path(__file__).parent / "cuda" / "w4a8.cu"
# The CUDA source has the same constants.
MOST_EXPERTS, WARPGROUP = 512, 128


class Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("x", ctypes.c_uint64 * 16),
        ("weight", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("layout", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("experts", ctypes.c_int),
        ("output_tiles", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("capacity", ctypes.c_int),
        ("contiguous", ctypes.c_int),
        ("static_scales", ctypes.c_int),
        # To a multiple of the map's alignment, 64.
        ("padding", ctypes.c_byte * 8),
    )


def takes(weight: Int4Experts) -> bool:
    """Whether it multiplies by them."""
    return weight.tiles.is_cuda and is_hopper(weight.tiles.device) and weight.shape[0] <= MOST_EXPERTS


def w4a8_grouped_gemm(x: ScaledRows, weight: Int4Experts, layout: Layout, tiling: Tiling | None = None) -> torch.Tensor:
    """For what it `takes`. tiling: by default the weight's for the expected rows of an expert."""
    experts, outputs, inputs = weight.shape
    device = x.values.device
    out = torch.empty(*layout.shape, outputs, dtype=torch.bfloat16, device=device)
    if not out.numel():
        return out
    tiling = tiling or choose_tiling(weight, layout)
    contiguous = isinstance(layout, ContiguousLayout)
    # A tile of a contiguous layout belongs to one expert.
    assert not contiguous or TILINGS[-1].rows % tiling.rows == 0
    arguments = Arguments(
        encode_rows(
            x.values.data_ptr(), rows=prod(layout.shape), row_bytes=inputs, box_rows=tiling.rows, box_bytes=GROUP
        ),
        weight.tiles.data_ptr(), x.scales.data_ptr(), _rows_of_experts(layout).data_ptr(), out.data_ptr(),
        experts, outputs // TILE_OUTPUTS, inputs // GROUP, layout.shape[-1], contiguous, x.static,
    )  # fmt: skip
    kind = "full" if weight.has_minimum else "symmetric"
    name = f"w4a8_{kind}_{tiling.rows}_{tiling.warpgroups}_{tiling.parts}"
    kernel = load_kernel(SOURCE, name, device.index or 0)
    threads = (tiling.warpgroups + 1) * WARPGROUP
    kernel.launch((_processors(device), 1, 1), threads, arguments, dependent=True)
    return out


def choose_tiling(weight: Int4Experts, layout: Layout) -> Tiling:
    if isinstance(layout, ContiguousLayout):
        return TILINGS[-1]
    return weight.tilings.choose(layout.expected_rows, layout.capacity)


def _rows_of_experts(layout: Layout) -> torch.Tensor:
    return layout.row_experts if isinstance(layout, ContiguousLayout) else layout.counts


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
