"""Experts' feed-forward layers of one token on Hopper, in Triton, with weights in bfloat16 or in scaled FP8. Two
kernels, which find their experts in the token's choices, in place of four: rows are neither placed nor copied.
"""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import Quantized
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.fp8_gemm.one_row import CHUNK, scaled_product
from kernels.fp8_gemm.operands import BLOCK, BlockScaled
from kernels.hopper import is_hopper
from kernels.moe_permute.layout import NOWHERE
from kernels.tile_sizes import cdiv, next_power_of_2

# Bytes of weights of a program, which fill 64 registers of a thread, and its warps: five programs a multiprocessor have
# three times as many bytes under way as its memory needs.
TILE_BYTES, WARPS = 1 << 15, 4
# The widest experts for which these kernels are chosen: they were measured with 2,048. Wider ones lie on several GPUs,
# and programs of choices that lie elsewhere would start for nothing.
MOST_WIDTH = 4096


# A program multiplies some outputs of one expert by the token, from registers. It belongs to one of the token's
# choices, which is also the row of its outputs. GATED: the first product, whose outputs are those of SwiGLU. Reads the
# weights of each expert that is chosen. SCALED: these have a scale a block; QUANTIZED: the token's values have one a
# group. What is between the products is in bfloat16 either way.
#
# Shared experts are chosen last, known without the choices, and started first: their first weights are read while the
# gate still chooses. The first product waits before it lets the last one start, which therefore finds the choices made,
# and reads its weights while the last tiles of the first product are computed.
#
# A program's latencies limit the bytes that are under way, so they overlap: only the weights' addresses depend on
# anything that it reads, and one token's values are loaded while the weights are.
@triton.jit(do_not_specialize=["count", "first", "x_scale_stride"])
def _chosen_experts(
    x, x_scales, weights, weight_scales, choices, positions, out, outputs, inputs, count, first, x_scale_stride,
    PLACES: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, QUANTIZED: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, OUTPUTS_TILE: tl.constexpr, INPUTS_TILE: tl.constexpr,
    NOWHERE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    place = PLACES - 1 - tl.program_id(1)
    expert = count - PLACES + place
    if GATED:
        # Otherwise nothing is read that the kernel before wrote.
        if place < PLACES - SHARED:
            wait_for_earlier(DEPENDENT)
    else:
        start_next(DEPENDENT)
    if place < PLACES - SHARED:
        # Past the first cache, which may have an earlier layer's choices.
        expert = tl.load(choices + place, cache_modifier=".cg").to(tl.int32) - first
    computes = (expert >= 0) & (expert < count)
    output, column = tl.program_id(0) * OUTPUTS_TILE + tl.arange(0, OUTPUTS_TILE), tl.arange(0, INPUTS_TILE)
    inside = column < inputs
    there = output < tl.where(computes, outputs, 0)
    matrix = weights + expert.to(tl.int64) * outputs * (2 if GATED else 1) * inputs
    own = matrix + output[:, None].to(tl.int64) * inputs + column[None, :]
    held = tl.load(own, mask=there[:, None] & inside[None, :], other=0.0)
    if GATED:
        up = tl.load(own + outputs * inputs, mask=there[:, None] & inside[None, :], other=0.0)
    held_scale, up_scale = 1.0, 1.0
    if SCALED:
        # All outputs of a program lie in the same blocks.
        line = expert * (outputs // BLOCK) * (2 if GATED else 1) + tl.program_id(0) * OUTPUTS_TILE // BLOCK
        block = tl.arange(0, INPUTS_TILE // CHUNK) * CHUNK // BLOCK
        scale, listed = weight_scales + line * (inputs // BLOCK) + block, block * BLOCK < inputs
        held_scale = tl.load(scale, mask=block * BLOCK < tl.where(computes, inputs, 0), other=0.0)
        if GATED:
            up_scale = tl.load(scale + outputs // BLOCK * (inputs // BLOCK), mask=listed, other=0.0)
    wait_for_earlier(DEPENDENT)
    row = x if GATED else x + place * inputs
    values = tl.load(row + column, mask=inside, other=0.0)
    if QUANTIZED:
        x_scale = tl.load(x_scales + block * x_scale_stride, mask=listed, other=0.0)
        held_scale *= x_scale
        up_scale *= x_scale
    if GATED:
        start_next(DEPENDENT)
    total = _product(held, values, held_scale, SCALED, CHUNK)
    if GATED:
        total = total * tl.sigmoid(total) * _product(up, values, up_scale, SCALED, CHUNK)
    tl.store(out + place * outputs + output, total.to(out.dtype.element_ty), mask=there)
    if GATED:  # noqa: SIM102 (the compiler decides only this one)
        if tl.program_id(0) == 0:
            # Padding chooses no expert, not even a shared one.
            own_choice = tl.load(choices + place, cache_modifier=".cg") - first
            tl.store(positions + place, tl.where((own_choice >= 0) & (own_choice < count), place, NOWHERE).to(tl.int64))


@triton.jit
def _product(weights, values, scales, SCALED: tl.constexpr, CHUNK: tl.constexpr):
    plain = weights.to(tl.float32) * values.to(tl.float32)[None, :]
    return scaled_product(weights, values, scales, CHUNK) if SCALED else tl.sum(plain, axis=1)


def takes(x: torch.Tensor | Quantized, gate_up: torch.Tensor | BlockScaled) -> bool:
    """Whether there is one token, and a program holds whole rows of both weights."""
    rows, weights = _values(x), _values(gate_up)
    _, matrix, hidden = weights.shape
    held = max(hidden, matrix // 2) <= MOST_WIDTH
    if isinstance(gate_up, BlockScaled):
        takes_format = isinstance(x, Quantized) and matrix // 2 % BLOCK == hidden % BLOCK == 0
    else:
        takes_format = rows.dtype == weights.dtype == torch.bfloat16
    return is_hopper() and len(rows) == 1 and takes_format and held and rows.is_contiguous()


def feed_forward(
    x: torch.Tensor | Quantized,
    choices: torch.Tensor,
    gate_up: torch.Tensor | BlockScaled,
    down: torch.Tensor | BlockScaled,
    first: int,
    shared: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.grouped_gemm.chosen_feed_forward`, for what it `takes`."""
    (experts, matrix, hidden), rows, device = _values(gate_up).shape, choices.numel(), choices.device
    width = matrix // 2
    assert _values(x).shape == (len(choices), hidden) and _values(down).shape == (experts, hidden, width)
    inner = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
    positions = torch.empty_like(choices)
    _launch(x, gate_up, choices, positions, inner, first, shared, gated=True)
    _launch(inner, down, choices, positions, out, first, shared, gated=False)
    return out, positions


def _launch(
    x: torch.Tensor | Quantized,
    weights: torch.Tensor | BlockScaled,
    choices: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    first: int,
    shared: int,
    *,
    gated: bool,
) -> None:
    x_scales = x.scales if isinstance(x, Quantized) else None
    weight_scales = weights.scales if isinstance(weights, BlockScaled) else None
    rows, matrices = _values(x), _values(weights)
    places, inputs, outputs = choices.shape[1], rows.shape[1], out.shape[1]
    padded = next_power_of_2(inputs)
    tile = TILE_BYTES // matrices.itemsize // padded // (2 if gated else 1)
    if weight_scales is not None:
        tile = min(tile, BLOCK)
    launch(_chosen_experts, (cdiv(outputs, tile), places), out.device,
        rows, x_scales, matrices, weight_scales, choices, positions, out, outputs, inputs, len(matrices), first,
        0 if x_scales is None else x_scales.stride(1), places, shared, gated, weight_scales is not None,
        x_scales is not None, BLOCK, CHUNK, tile, padded, NOWHERE, num_warps=WARPS,
    )  # fmt: skip


def _values(given: torch.Tensor | Quantized | BlockScaled) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else given.values
