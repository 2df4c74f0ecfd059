"""Our kernel of both products for few tokens on Hopper: `cuda/few_rows.cu`."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.moe_permute.layout import Layout, MaskedLayout
from kernels.nvrtc import load_kernel
from kernels.w4a8_gemm.activations import ScaledRows
from kernels.w4a8_gemm.feed_forward import Int4FeedForward
from kernels.w4a8_gemm.tiling import MOST_FEW_BYTES, spared
from kernels.w4a8_gemm.weight import GROUP, TILE_OUTPUTS, Int4Experts

SOURCE = Path(__file__).parent / "cuda" / "few_rows.cu"
# The CUDA source has the same constants. MOST_ROWS: of one expert.
MOST_EXPERTS, MOST_ROWS, COUNTER_STRIDE = 512, 8, 8
# A team of PARTS warps divides the inputs of a unit of the first product; a warp has whole units of the last one.
WARPS, PARTS, TEAMS = 16, 8, 2
STRIP, MOST_STRIPS = 16, 3


class Weight(ctypes.Structure):
    """`Weight` of the source."""

    _fields_ = (("tiles", ctypes.c_void_p), ("output_tiles", ctypes.c_int), ("groups", ctypes.c_int))

    @classmethod
    def of(cls, weight: Int4Experts) -> "Weight":
        _, outputs, inputs = weight.shape
        return cls(weight.tiles.data_ptr(), outputs // TILE_OUTPUTS, inputs // GROUP)


class Arguments(ctypes.Structure):
    """`Arguments` of the source."""

    _fields_ = (
        ("first", Weight),
        ("last", Weight),
        ("x", ctypes.c_void_p),
        ("x_scales", ctypes.c_void_p),
        ("inner_scales", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("progress", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("experts", ctypes.c_int),
        ("capacity", ctypes.c_int),
    )


def takes(experts: Int4FeedForward, layout: Layout) -> bool:
    """Whether the kernel supports this layer and should compute it. No token may have chosen an expert twice.

    Weights of -8, which no quantizer writes, would take three times as long to decode. If other ranks have other
    experts whole, tiles are faster.
    """
    if not isinstance(layout, MaskedLayout) or layout.elsewhere or not is_hopper(experts.factors.device):
        return False
    if experts.gate_up.has_minimum or experts.down.has_minimum:
        return False
    few = layout.shape[0] <= MOST_EXPERTS and layout.positions.shape[0] <= MOST_ROWS
    return few and layout.expected_copies * experts.expert_bytes <= MOST_FEW_BYTES


def w4a8_feed_forward(
    x: ScaledRows,
    experts: Int4FeedForward,
    layout: MaskedLayout,
    ctas: int | None = None,
    strips: int | None = None,
) -> torch.Tensor:
    """For what it `takes`. ctas: by default one for each multiprocessor that is not spared; strips: of a unit. Results
    depend on neither.
    """
    count, hidden, width = experts.down.shape
    device = x.values.device
    out = torch.empty(*layout.shape, hidden, dtype=torch.bfloat16, device=device)
    if not out.numel():
        return out
    assert len(experts.progress) > MOST_EXPERTS * COUNTER_STRIDE
    inner = torch.empty(*layout.shape, width, dtype=torch.float8_e4m3fn, device=device)
    arguments = Arguments(
        Weight.of(experts.gate_up), Weight.of(experts.down), x.values.data_ptr(), x.scales.data_ptr(),
        experts.input_scales.data_ptr(), layout.counts.data_ptr(), experts.factors.data_ptr(), inner.data_ptr(),
        experts.progress.data_ptr(), out.data_ptr(), count, layout.capacity,
    )  # fmt: skip
    ctas = ctas or processors(device) - spared(layout.expected_copies, experts.expert_bytes)
    touched = min(round(layout.expected_copies), count)
    strips = strips or choose_strips(touched, hidden, width, ctas)
    kernel = load_kernel(SOURCE, f"w4a8_few_rows_{strips}", device.index or 0)
    kernel.launch((ctas, 1, 1), WARPS * 32, arguments, dependent=True)
    return out


@cache
def choose_strips(touched: int, hidden: int, width: int, ctas: int) -> int:
    """Strips of a unit with which the busiest warp has the least to do."""

    def cost(strips: int) -> float:
        first = touched * ceil_divide(2 * width // STRIP, strips)
        last = touched * ceil_divide(hidden // STRIP, strips)
        groups = ceil_divide(first, TEAMS * ctas) * ceil_divide(hidden // GROUP, PARTS)
        groups += ceil_divide(last, WARPS * ctas) * (width // GROUP)
        # Loading and converting a group of rows takes half as many instructions as a strip's weights.
        return groups * (strips + 0.5)

    return min(range(MOST_STRIPS, 0, -1), key=cost)


def ceil_divide(value: int, by: int) -> int:
    return -(-value // by)
