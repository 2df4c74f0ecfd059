"""Our kernel of one or two tokens' experts on Hopper: `cuda/few_tokens.cu`."""

import ctypes
from functools import cache
from pathlib import Path

import torch

from kernels.hopper import is_hopper, processors
from kernels.nvrtc import load_kernel
from kernels.structures import structure
from kernels.tile_sizes import cdiv
from kernels.w4a8_gemm.feed_forward import Int4FeedForward
from kernels.w4a8_gemm.operands import TILE_INPUTS, TILE_OUTPUTS, Int4Experts
from kernels.w4a8_gemm.tiling import MOST_FEW_BYTES, spared

SOURCE = Path(__file__).parent / "cuda" / "few_tokens.cu"
Weight, Arguments = structure(SOURCE, "Weight"), structure(SOURCE, "Arguments")
# The CUDA source has the same constants. MOST_CHOICES: of all tokens.
MOST_TOKENS, MOST_CHOICES, COUNTER_STRIDE = 2, 32, 8
# A team of PARTS warps divides the inputs of a unit of the first product; a warp has whole units of the last one. A
# warp's groups of inputs are HELD_GROUPS at most.
WARPS, PARTS, TEAMS, HELD_GROUPS = 16, 8, 2, 8
STRIP, MOST_STRIPS = 16, 3


def takes(x: torch.Tensor, choices: torch.Tensor, experts: Int4FeedForward) -> bool:
    """Whether the kernel supports these, and is the fastest.

    Weights of -8, which no quantizer writes, would take three times as long to decode.
    """
    if x.dtype != torch.bfloat16 or not is_hopper(x.device) or not 0 < len(x) <= MOST_TOKENS:
        return False
    if experts.gate_up.has_minimum or experts.down.has_minimum or choices.numel() > MOST_CHOICES:
        return False
    if experts.gate_up.group != TILE_INPUTS:
        return False
    _, hidden, width = experts.down.shape
    held = hidden <= PARTS * HELD_GROUPS * TILE_INPUTS and width <= HELD_GROUPS * TILE_INPUTS
    return held and choices.numel() * experts.expert_bytes <= MOST_FEW_BYTES


def feed_forward(
    x: torch.Tensor,
    choices: torch.Tensor,
    experts: Int4FeedForward,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor,
    ctas: int | None = None,
    strips: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.w4a8_gemm.few_tokens_feed_forward`, for what the kernel `takes`.

    ctas: by default one for each multiprocessor that is not spared; strips: of a unit. Results depend on neither.
    """
    count, hidden, width = experts.down.shape
    device, rows = x.device, choices.numel()
    out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
    inner = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=device)
    positions = torch.empty_like(choices)
    assert len(experts.progress) > MOST_CHOICES * COUNTER_STRIDE
    arguments = Arguments(
        first=_weight(experts.gate_up), last=_weight(experts.down), x=x.data_ptr(),
        pre_scale=None if pre_scale is None else pre_scale.data_ptr(), x_scale=input_scale.data_ptr(),
        inner_scales=experts.input_scales.data_ptr(), factors=experts.factors.data_ptr(), chosen=choices.data_ptr(),
        positions=positions.data_ptr(), inner=inner.data_ptr(), out=out.data_ptr(),
        progress=experts.progress.data_ptr(), tokens=choices.shape[0], choices=choices.shape[1],
    )  # fmt: skip
    ctas = ctas or processors(device) - spared(rows, experts.expert_bytes, count)
    strips = strips or choose_strips(min(rows, count), hidden, width, ctas)
    kernel = load_kernel(SOURCE, f"w4a8_few_tokens_{strips}", device.index or 0)
    kernel.launch((ctas, 1, 1), WARPS * 32, arguments, dependent=True)
    return out, positions


def _weight(weight: Int4Experts) -> ctypes.Structure:
    _, outputs, inputs = weight.shape
    return Weight(tiles=weight.tiles.data_ptr(), output_tiles=outputs // TILE_OUTPUTS, groups=inputs // TILE_INPUTS)


@cache
def choose_strips(touched: int, hidden: int, width: int, ctas: int) -> int:
    """Strips of a unit with which the busiest warp has the least to do."""

    def cost(strips: int) -> float:
        first = touched * cdiv(2 * width // STRIP, strips)
        last = touched * cdiv(hidden // STRIP, strips)
        groups = cdiv(first, TEAMS * ctas) * cdiv(hidden // TILE_INPUTS, PARTS)
        groups += cdiv(last, WARPS * ctas) * (width // TILE_INPUTS)
        # In addition to its strips, a group takes half as long as one of them.
        return groups * (strips + 0.5)

    return min(range(MOST_STRIPS, 0, -1), key=cost)
