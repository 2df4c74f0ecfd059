"""Rows for INT4 experts in plain torch, the definition."""

import torch
from torch.nn import functional

from kernels.moe_permute import choose_layout
from kernels.moe_permute.layout import ContiguousLayout, Layout
from kernels.w4a8_gemm import ScaledRows

LARGEST = torch.finfo(torch.float8_e4m3fn).max
# A row of zeros, or of values so small that their scale would underflow, quantizes to zeros.
SMALLEST = 1e-10


def place_rows(
    x: torch.Tensor,
    choices: torch.Tensor,
    expert_count: int,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
) -> tuple[ScaledRows, Layout]:
    layout = choose_layout(choices, expert_count)
    scaled = x.float() if pre_scale is None else x.float() * pre_scale
    copies = scaled.new_zeros(*layout.shape, x.shape[1])
    copies.flatten(0, -2)[layout.positions.flatten()] = scaled.repeat_interleave(choices.shape[1], dim=0)
    return _quantize(copies, layout, input_scale), layout


def swiglu_rows(
    gate_up: torch.Tensor, layout: Layout, pre_scale: torch.Tensor | None, input_scale: torch.Tensor | None
) -> ScaledRows:
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = functional.silu(gate) * up
    if pre_scale is not None:
        inner *= _of_rows(pre_scale, layout)
    return _quantize(inner, layout, input_scale)


def _quantize(rows: torch.Tensor, layout: Layout, input_scale: torch.Tensor | None) -> ScaledRows:
    if input_scale is None:
        largest = rows.abs().amax(dim=-1).clamp(min=SMALLEST)
        # Dividing by a number, torch multiplies by its reciprocal on a GPU, which rounds differently.
        scales = largest / torch.full_like(largest, LARGEST)
        divisors = scales.unsqueeze(-1)
    else:
        scales, divisors = input_scale, _of_rows(input_scale.unsqueeze(1), layout)
    values = (rows * divisors.reciprocal()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return ScaledRows(values, scales, static=input_scale is not None)


def _of_rows(by_expert: torch.Tensor, layout: Layout) -> torch.Tensor:
    """[experts, width] as each row's: [rows, width], or [experts, 1, width]."""
    if isinstance(layout, ContiguousLayout):
        return by_expert[layout.row_experts.clamp(min=0)]
    return by_expert.unsqueeze(1)
