"""SwiGLU with quantization in Triton."""

import torch
import triton
import triton.language as tl

from kernels.act_quant.quantized import GROUP, Quantized, empty_quantized
from kernels.act_quant.triton import quantize_groups

GROUPS = 8
# Programs that share an expert's rows: enough to fill the chip, few enough that those without a row cost little.
ROW_PROGRAMS = 16


# A program does 8 groups of every `num_programs(0)`-th row of one expert. Reads 4 bytes a value, writes 1 and 1/32.
@triton.jit
def _swiglu_quantize(
    gate_up, counts, values, scales, capacity, width, scale_stride,
    HAS_COUNTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    rows = capacity
    if HAS_COUNTS:
        rows = tl.load(counts + expert)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = columns < width
    scales += expert * (width // GROUP) * scale_stride
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = expert * capacity + index
        gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
        quantized, factors = quantize_groups(gate * tl.sigmoid(gate) * up)
        tl.store(values + row * width + columns, quantized, mask=inside)
        tl.store(scales + groups * scale_stride + index, factors, mask=groups * GROUP < width)


def swiglu_quantize(gate_up: torch.Tensor, counts: torch.Tensor | None) -> Quantized:
    *leading, rows, doubled = gate_up.shape
    width = doubled // 2
    out = empty_quantized(*leading, rows, width, device=gate_up.device)
    if gate_up.numel():
        experts = leading[0] if leading else 1
        programs = rows if counts is None else min(rows, ROW_PROGRAMS)
        grid = (programs, triton.cdiv(width // GROUP, GROUPS), experts)
        _swiglu_quantize[grid](
            gate_up, counts, out.values, out.scales, rows, width, out.scales.stride(-1),
            counts is not None, GROUP, GROUPS, num_warps=4,
        )  # fmt: skip
    return out
