"""Quantization of activations in Triton."""

import torch
import triton
import triton.language as tl

from kernels.act_quant import reference
from kernels.act_quant.quantized import GROUP, QuantizedRows
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.tile_sizes import cdiv

LARGEST = tl.constexpr(448.0)
SMALLEST = tl.constexpr(reference.SMALLEST)
# Groups of one program.
GROUPS = 8


@triton.jit
def least_power(x):
    """The least powers of two that are not smaller; x: positive float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_groups(x, POWERS: tl.constexpr):
    """[groups, 128] float32 to e4m3 of the same shape, and [groups] float32 scales, powers of two if POWERS. For other
    kernels to fuse.
    """
    scales = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), SMALLEST), LARGEST)
    if POWERS:
        scales = least_power(scales)
    return tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape)).to(tl.float8e4nv), scales


# A program does 8 groups of one row. Reads 2 bytes a value, writes 1 and 1/32.
@triton.jit(do_not_specialize=["scale_stride"])
def _quantize(
    x, values, scales, row_stride, value_stride, width, scale_stride,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, POWERS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < width
    wait_for_earlier(DEPENDENT)
    found = tl.load(x + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    quantized, factors = quantize_groups(found, POWERS)
    tl.store(values + row * value_stride + columns, quantized, mask=inside)
    tl.store(scales + groups * scale_stride + row, factors, mask=groups * GROUP < width)


def quantize_into(x: torch.Tensor, out: QuantizedRows) -> None:
    rows, width = x.shape
    if rows:
        grid = (rows, cdiv(width // GROUP, GROUPS))
        launch(_quantize, grid, x.device,
            x, out.values, out.scales, x.stride(0), out.values.stride(0), width, out.scales.stride(1), GROUP, GROUPS,
            out.powers, num_warps=4,
        )  # fmt: skip
