"""Our products for Hopper: `cuda/expert_products.cuh`, compiled for each size of groups."""

import ctypes
from math import prod
from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.moe_permute.layout import ContiguousLayout, Layout
from kernels.nvrtc import encode_rows, load_kernel
from kernels.structures import structure
from kernels.w4a8_gemm.feed_forward import Int4FeedForward
from kernels.w4a8_gemm.operands import TILE_INPUTS, TILE_OUTPUTS, Int4Experts, ScaledRows
from kernels.w4a8_gemm.tiling import TILINGS, Tiling, narrowed, spared

FOLDER = Path(__file__).parent / "cuda"
# By the inputs that share a scale.
SOURCES = {128: FOLDER / "w4a8.cu", 32: FOLDER / "w4a8_groups_of_32.cu"}
Operands, Arguments = structure(SOURCES[128], "Operands"), structure(SOURCES[128], "Arguments")
# The CUDA source has the same constants.
MOST_EXPERTS, WARPGROUP = 512, 128


def takes(weight: Int4Experts) -> bool:
    """Whether these products take the weight."""
    return weight.tiles.is_cuda and is_hopper(weight.tiles.device) and weight.shape[0] <= MOST_EXPERTS


def w4a8_grouped_gemm(x: ScaledRows, weight: Int4Experts, layout: Layout, tiling: Tiling | None = None) -> torch.Tensor:
    """As `kernels.w4a8_gemm.w4a8_grouped_gemm`, for weights that it `takes`. tiling: by default the weight's for the
    expected rows of an expert.
    """
    out = torch.empty(*layout.shape, weight.shape[1], dtype=torch.bfloat16, device=x.values.device)
    if out.numel():
        tiling = tiling or choose_tiling(weight, layout)
        last = _operands(x, weight, layout, tiling)
        none = Operands(x=last.x)
        arguments = Arguments(first=none, last=last, static_scales=x.static)
        _launch(arguments, weight, weight.has_minimum, layout, tiling, out)
    return out


def w4a8_feed_forward(
    x: ScaledRows, experts: Int4FeedForward, layout: Layout, tiling: Tiling | None = None
) -> torch.Tensor:
    """As `kernels.w4a8_gemm.w4a8_feed_forward`, for weights that it `takes`. tiling: by default that of gate and up,
    for both products.
    """
    hidden, width = experts.down.shape[1:]
    out = torch.empty(*layout.shape, hidden, dtype=torch.bfloat16, device=x.values.device)
    if not out.numel():
        return out
    tiling = tiling or choose_tiling(experts.gate_up, layout)
    assert _most_row_tiles(layout, tiling) <= len(experts.progress)
    values = torch.empty(*layout.shape, width, dtype=torch.float8_e4m3fn, device=out.device)
    inner = ScaledRows(values, experts.input_scales, static=True)
    arguments = Arguments(
        first=_operands(x, experts.gate_up, layout, tiling), last=_operands(inner, experts.down, layout, tiling),
        factors=experts.factors.data_ptr(), inner=values.data_ptr(), progress=experts.progress.data_ptr(),
        static_scales=True,
    )  # fmt: skip
    has_minimum = experts.gate_up.has_minimum or experts.down.has_minimum
    _launch(arguments, experts.gate_up, has_minimum, layout, tiling, out)
    return out


def choose_tiling(weight: Int4Experts, layout: Layout) -> Tiling:
    if isinstance(layout, ContiguousLayout):
        return TILINGS[-1]
    tiling, (_, *gate_up) = weight.tilings.choose(layout.expected_rows, layout.capacity), weight.shape
    return narrowed(tiling, (gate_up[0], gate_up[1]), layout.expected_copies, divided=layout.elsewhere > 0)


def _operands(x: ScaledRows, weight: Int4Experts, layout: Layout, tiling: Tiling) -> ctypes.Structure:
    _, outputs, inputs = weight.shape
    rows, address = prod(layout.shape), x.values.data_ptr()
    boxes = encode_rows(address, rows, inputs, tiling.box_rows, TILE_INPUTS)
    return Operands(
        x=boxes, weight=weight.tiles.data_ptr(), x_scales=x.scales.data_ptr(), output_tiles=outputs // TILE_OUTPUTS,
        groups=inputs // TILE_INPUTS,
    )  # fmt: skip


def _launch(
    arguments: ctypes.Structure,
    weight: Int4Experts,
    has_minimum: bool,
    layout: Layout,
    tiling: Tiling,
    out: torch.Tensor,
) -> None:
    """weight: of the only or the first product."""
    contiguous = isinstance(layout, ContiguousLayout)
    # A tile of a contiguous layout belongs to one expert.
    assert not contiguous or TILINGS[-1].rows % tiling.rows == 0
    arguments.layout, arguments.out = _rows_of_experts(layout).data_ptr(), out.data_ptr()
    arguments.drawn, arguments.experts = weight.drawn.data_ptr(), weight.shape[0]
    arguments.capacity, arguments.contiguous = layout.shape[-1], contiguous
    kind = "full" if has_minimum else "symmetric"
    name = f"w4a8_{kind}_{tiling.rows}_{tiling.warpgroups}_{tiling.parts}_{tiling.turns}"
    kernel = load_kernel(SOURCES[weight.group], name, out.device.index or 0)
    threads = (tiling.warpgroups + 1) * WARPGROUP
    ctas = processors(out.device) - _spared(arguments, weight, layout)
    kernel.launch((ctas, 1, 1), threads, arguments, dependent=True)


def _spared(arguments: ctypes.Structure, weight: Int4Experts, layout: Layout) -> int:
    if isinstance(layout, ContiguousLayout):
        return 0
    products = arguments.first, arguments.last
    expert_bytes = sum(product.output_tiles * product.groups for product in products) * weight.tiles.shape[-1]
    return spared(layout.expected_copies, expert_bytes, weight.shape[0])


def _most_row_tiles(layout: Layout, tiling: Tiling) -> int:
    *experts, rows = layout.shape
    return prod(experts) * -(-rows // tiling.rows)


def _rows_of_experts(layout: Layout) -> torch.Tensor:
    return layout.row_experts if isinstance(layout, ContiguousLayout) else layout.counts
