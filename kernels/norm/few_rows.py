"""Residual addition, norm and the gate's logits of a few rows on Hopper, in Triton: one kernel in place of two."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, empty_quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.few_rows import are_few
from kernels.hopper import is_hopper
from kernels.norm.gated import Gated
from kernels.tile_sizes import next_power_of_2

# The most groups of a row, whose programs each leave a share of the logits, and the most experts, whose weights for a
# group a program holds in registers.
MOST_SHARES, MOST_EXPERTS = 16, 128
WARPS = 4


# A program does 128 values of a row, and each program of a row adds and squares all of it for itself: that takes less
# time than to meet. So the sums go to another place than they come from. Reads 2 bytes a weight of the gate before it
# waits, then 4 bytes a value from the second-level cache. The latency of a load, a sum over the program's threads and
# the sums of the logits limits it.
@triton.jit(do_not_specialize=["rows", "scale_stride"])
def _add_rms_norm_and_logits(
    delta, residual, weight, gate, added, plain, values, scales, logits, row_stride, rows, scale_stride, epsilon,
    WIDTH: tl.constexpr, WIDTH_TILE: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_TILE: tl.constexpr,
    GROUP: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    share, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own, column, expert = share * GROUP + tl.arange(0, GROUP), tl.arange(0, WIDTH_TILE), tl.arange(0, EXPERTS_TILE)
    inside, listed = column < WIDTH, expert < EXPERTS
    factors = tl.load(weight + own).to(tl.float32)
    gates = tl.load(gate + expert[:, None] * WIDTH + own[None, :], mask=listed[:, None], other=0.0)
    wait_for_earlier(DEPENDENT)
    delta, residual = delta + row * row_stride, residual + row * WIDTH
    found = _added(tl.load(delta + own), tl.load(residual + own))
    whole = _added(tl.load(delta + column, mask=inside, other=0.0), tl.load(residual + column, mask=inside, other=0.0))
    whole = whole.to(tl.float32)
    scale = tl.rsqrt(tl.sum(whole * whole, axis=0) / WIDTH + epsilon)
    # Rounds twice, as the reference does: after normalizing and after multiplying.
    normalized = ((found.to(tl.float32) * scale).to(found.dtype).to(tl.float32) * factors).to(found.dtype)
    target = row * WIDTH + own
    tl.store(added + target, found)
    tl.store(plain + target, normalized)
    if QUANTIZE:
        quantized, group_scale = quantize_groups(normalized.to(tl.float32)[None, :], POWERS)
        tl.store(values + target[None, :], quantized)
        tl.store(scales + share * scale_stride + row + tl.arange(0, 1), group_scale)
    product = tl.sum(gates.to(tl.float32) * normalized.to(tl.float32)[None, :], axis=1)
    tl.store(logits + (share * rows + row) * EXPERTS + expert, product, mask=listed)


@triton.jit
def _added(delta, residual):
    return (delta.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)


def takes(delta: torch.Tensor, residual: torch.Tensor, gate: torch.Tensor) -> bool:
    """Whether there are few rows, not too wide, for few experts. gate: [experts, width]."""
    experts, width = gate.shape
    fits = width % GROUP == 0 and width // GROUP <= MOST_SHARES and experts <= MOST_EXPERTS
    return is_hopper() and are_few(residual) and residual.dtype == delta.dtype == torch.bfloat16 and fits


def add_rms_norm_and_logits(
    delta: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    gate: torch.Tensor,
    *,
    quantizes: bool,
    powers: bool = False,
) -> Gated:
    """`kernels.norm.add_rms_norm` of what it `takes`, and `kernels.linear.multiply_in_shares` of the result.

    The residual stays as it is: the result has another one.
    """
    (rows, width), experts = residual.shape, gate.shape[0]
    assert delta.shape == residual.shape and gate.is_contiguous() and delta.stride(1) == 1
    quantized = empty_quantized(rows, width, device=residual.device, powers=powers) if quantizes else None
    made = Gated(
        torch.empty_like(residual),
        torch.empty_like(residual),
        quantized,
        torch.empty(width // GROUP, rows, experts, dtype=torch.float32, device=residual.device),
    )
    launch(_add_rms_norm_and_logits, (width // GROUP, rows), residual.device,
        delta, residual, weight, gate, made.residual, made.plain,
        None if quantized is None else quantized.values, None if quantized is None else quantized.scales,
        made.logits, delta.stride(0), rows, 0 if quantized is None else quantized.scales.stride(1), epsilon,
        width, next_power_of_2(width), experts, next_power_of_2(experts), GROUP, quantizes, powers,
        num_warps=WARPS,
    )  # fmt: skip
    return made
