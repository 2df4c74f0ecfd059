"""Normalization in Triton, of two inputs at once or fused with residual addition and quantization."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.tile_sizes import cdiv, next_power_of_2


@triton.jit
def normalize(x, weight, width, epsilon):
    """x: [groups, 128] float32, zero beyond `width`; weight: the same shape. Rounds to the weight's dtype twice, as
    the reference does: after normalizing and after multiplying."""
    scale = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / width + epsilon)
    return ((x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


# A program does one row and keeps it in registers. Reads 4 bytes a value and writes 2, 2 more if the normalized row is
# wanted as it is, and 1 and 1/32 more if it is wanted in FP8.
@triton.jit(do_not_specialize=["scale_stride"])
def _add_rms_norm(
    delta, residual, weight, plain, values, scales, row_stride, width, scale_stride, epsilon,
    PLAIN: tl.constexpr, QUANTIZE: tl.constexpr, POWERS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_earlier(DEPENDENT)
    found = tl.load(delta + row * row_stride + columns, mask=inside, other=0.0)
    before = tl.load(residual + row * width + columns, mask=inside, other=0.0)
    found = (found.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
    tl.store(residual + row * width + columns, found, mask=inside)
    normalized = normalize(found.to(tl.float32), factors, width, epsilon)
    if PLAIN:
        tl.store(plain + row * width + columns, normalized, mask=inside)
    if QUANTIZE:
        quantized, group_scales = quantize_groups(normalized.to(tl.float32), POWERS)
        tl.store(values + row * width + columns, quantized, mask=inside)
        tl.store(scales + groups * scale_stride + row, group_scales, mask=groups * GROUP < width)


# A program does one row of one of the two inputs and keeps it in registers. Reads 2 bytes a value and writes 2.
@triton.jit
def _join_rms_norms(
    first, second, first_weight, second_weight, out, first_stride, second_stride, width, epsilon,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    target = out + row * 2 * width + side * width
    if side == 0:
        _normalize_row(first + row * first_stride, first_weight, target, columns, width, epsilon)
    else:
        _normalize_row(second + row * second_stride, second_weight, target, columns, width, epsilon)


@triton.jit
def _normalize_row(source, weight, target, columns, width, epsilon):
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    found = tl.load(source + columns, mask=inside, other=0.0)
    tl.store(target + columns, normalize(found.to(tl.float32), factors, width, epsilon), mask=inside)


def join_rms_norms(
    first: torch.Tensor, second: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    rows, width = first.shape
    out = torch.empty(rows, 2 * width, dtype=first.dtype, device=first.device)
    if rows:
        groups = _groups(width)
        launch(_join_rms_norms, (rows, 2), first.device,
            first, second, first_weight, second_weight, out, first.stride(0), second.stride(0), width, epsilon,
            groups, GROUP, num_warps=_warps(groups, 8),
        )  # fmt: skip
    return out


def add_rms_norm(
    delta: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    plain: torch.Tensor | None,
    quantized: Quantized | None,
) -> None:
    rows, width = delta.shape
    if not rows:
        return
    groups = _groups(width)
    launch(_add_rms_norm, (rows,), delta.device,
        delta, residual, weight, plain,
        None if quantized is None else quantized.values, None if quantized is None else quantized.scales,
        delta.stride(0), width, 0 if quantized is None else quantized.scales.stride(1), epsilon,
        plain is not None, quantized is not None, quantized is not None and quantized.powers, groups, GROUP,
        # Quantizing waits for reductions within groups. More warps, of one or two groups each, hide that.
        num_warps=_warps(groups, 8 if quantized is None else 2),
    )  # fmt: skip


def _groups(width: int) -> int:
    """How many groups a program's registers hold."""
    return int(next_power_of_2(cdiv(width, GROUP)))


def _warps(groups: int, groups_a_warp: int) -> int:
    return min(max(groups // groups_a_warp, 1), 32)
