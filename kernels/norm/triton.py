"""Normalization in Triton, alone or fused with residual addition and quantization."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import dependent_launch, start_next, wait_for_earlier


@triton.jit
def normalize(x, weight, width, epsilon):
    """x: [groups, 128] float32, zero beyond `width`; weight: the same shape. Rounds to the weight's dtype twice, as
    the reference does: after normalizing and after multiplying."""
    scale = tl.rsqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / width + epsilon)
    return ((x * scale).to(weight.dtype).to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)


# A program does one row and keeps it in registers. Reads 2 bytes a value (4 with a residual), writes 2 (4 with a
# residual, and 1 and 1/32 more if it quantizes).
@triton.jit(do_not_specialize=["scale_stride"])
def _rms_norm(
    x, residual, weight, out, values, scales, row_stride, width, scale_stride, epsilon,
    ADD: tl.constexpr, QUANTIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < width
    factors = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_earlier(DEPENDENT)
    found = tl.load(x + row * row_stride + columns, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + row * width + columns, mask=inside, other=0.0)
        found = (found.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(residual + row * width + columns, found, mask=inside)
    normalized = normalize(found.to(tl.float32), factors, width, epsilon)
    tl.store(out + row * width + columns, normalized, mask=inside)
    if QUANTIZE:
        quantized, group_scales = quantize_groups(normalized.to(tl.float32))
        tl.store(values + row * width + columns, quantized, mask=inside)
        tl.store(scales + groups * scale_stride + row, group_scales, mask=groups * GROUP < width)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _launch(x, None, weight, epsilon, None)


def add_rms_norm(delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return _launch(delta, residual, weight, epsilon, None)


def add_rms_norm_quantized(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, Quantized]:
    quantized = empty_quantized(*residual.shape, device=residual.device)
    return _launch(delta, residual, weight, epsilon, quantized), quantized


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, epsilon: float, quantized: Quantized | None
) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    groups = triton.next_power_of_2(triton.cdiv(width, GROUP))
    _rms_norm[(rows,)](
        x, residual, weight, out,
        None if quantized is None else quantized.values, None if quantized is None else quantized.scales,
        x.stride(0), width, 0 if quantized is None else quantized.scales.stride(1), epsilon,
        residual is not None, quantized is not None, groups, GROUP,
        # Quantizing waits for reductions within groups. More warps, of one or two groups each, hide that.
        num_warps=min(max(groups // (8 if quantized is None else 2), 1), 32),
        **dependent_launch(x.device),
    )  # fmt: skip
    return out
