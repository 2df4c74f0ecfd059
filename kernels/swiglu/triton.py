"""SwiGLU in Triton, with quantization and without."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.act_quant.triton import quantize_groups
from kernels.dependent_launch import launch, start_next, wait_for_earlier
from kernels.tile_sizes import cdiv

# Groups of one program, and columns of one that does not quantize.
GROUPS, COLUMNS = 8, 1024


# A program does 1,024 columns of one row. Reads 4 bytes a value and writes 2.
@triton.jit
def _swiglu(gate_up, out, width, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr):
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        launch(_swiglu, (rows, cdiv(width, COLUMNS)), gate_up.device, gate_up, out, width, COLUMNS, num_warps=4)
    return out


# A program does 8 groups of one row. Reads 4 bytes a value, writes 1 and 1/32.
@triton.jit(do_not_specialize=["capacity", "scale_stride"])
def _swiglu_quantize(
    gate_up, positions, values, scales, capacity, width, scale_stride,
    HAS_POSITIONS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, POWERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    start_next(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    if HAS_POSITIONS:
        row = tl.load(positions + row)
        if row < 0:
            return
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    quantized, factors = quantize_groups(gate * tl.sigmoid(gate) * up, POWERS)
    tl.store(values + row * width + columns, quantized, mask=inside)
    # Each expert's scales lie together; rows without experts count as one expert.
    scales += row // capacity * (width // GROUP) * scale_stride + row % capacity
    tl.store(scales + groups * scale_stride, factors, mask=groups * GROUP < width)


def swiglu_quantize(gate_up: torch.Tensor, positions: torch.Tensor | None, powers: bool = False) -> Quantized:
    *leading, rows, doubled = gate_up.shape
    width = doubled // 2
    out = empty_quantized(*leading, rows, width, device=gate_up.device, powers=powers)
    programs = gate_up.shape[:-1].numel() if positions is None else positions.numel()
    if programs:
        launch(_swiglu_quantize, (programs, cdiv(width // GROUP, GROUPS)), gate_up.device,
            gate_up, positions, out.values, out.scales, rows, width, out.scales.stride(-1),
            positions is not None, GROUP, GROUPS, powers, num_warps=4,
        )  # fmt: skip
    return out
