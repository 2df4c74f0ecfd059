"""Rows for INT4 experts in plain torch, the definition."""

import torch
from torch.nn import functional

from kernels.moe_permute import choose_layout
from kernels.moe_permute.layout import ContiguousLayout, Layout
from kernels.moe_permute.reference import kept_rows
from kernels.w4a8_gemm import ScaledRows, gate_and_up

LARGEST = torch.finfo(torch.float8_e4m3fn).max
# A row of zeros, or of values so small that their scale would underflow, quantizes to zeros.
SMALLEST = 1e-10


def place_rows(
    x: torch.Tensor,
    choices: torch.Tensor,
    expert_count: int,
    pre_scale: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    first: int,
    elsewhere: int,
) -> tuple[ScaledRows, Layout]:
    layout = choose_layout(choices, expert_count, first, elsewhere)
    scaled = x.float() if pre_scale is None else x.float() * pre_scale
    copies = scaled.new_zeros(*layout.shape, x.shape[1])
    source, target = kept_rows(layout)
    copies.flatten(0, -2)[target] = scaled[source]
    return _quantize(copies, layout, input_scale), layout


def quantize_rows(x: torch.Tensor, pre_scale: torch.Tensor | None, input_scale: torch.Tensor | None) -> ScaledRows:
    scaled = x.float() if pre_scale is None else x.float() * pre_scale
    if input_scale is None:
        return _scaled_by_row(scaled)
    # All experts have the same scale.
    return ScaledRows(_rounded(scaled, input_scale[:1]), input_scale, static=True)


def place_quantized(
    x: ScaledRows, choices: torch.Tensor, expert_count: int, first: int, elsewhere: int
) -> tuple[ScaledRows, Layout]:
    layout = choose_layout(choices, expert_count, first, elsewhere)
    source, target = kept_rows(layout)
    copies = torch.zeros(*layout.shape, x.values.shape[1], dtype=torch.uint8, device=choices.device)
    # As bytes: few operations support one-byte floats.
    copies.flatten(0, -2)[target] = x.values.view(torch.uint8)[source]
    values = copies.view(torch.float8_e4m3fn)
    if x.static:
        return ScaledRows(values, x.scales, static=True), layout
    scales = x.scales.new_zeros(layout.shape)
    scales.flatten()[target] = x.scales[source]
    return ScaledRows(values, scales, static=False), layout


def swiglu_rows(gate_up: torch.Tensor, layout: Layout, pre_scale: torch.Tensor | None) -> ScaledRows:
    gate, up = gate_and_up(gate_up.float())
    inner = functional.silu(gate) * up
    if pre_scale is not None:
        inner *= _of_rows(pre_scale, layout)
    return _scaled_by_row(inner)


def _quantize(rows: torch.Tensor, layout: Layout, input_scale: torch.Tensor | None) -> ScaledRows:
    if input_scale is None:
        return _scaled_by_row(rows)
    return ScaledRows(_rounded(rows, _of_rows(input_scale.unsqueeze(1), layout)), input_scale, static=True)


def _scaled_by_row(rows: torch.Tensor) -> ScaledRows:
    largest = rows.abs().amax(dim=-1).clamp(min=SMALLEST)
    # Dividing by a number, torch multiplies by its reciprocal on a GPU, which rounds differently.
    scales = largest / torch.full_like(largest, LARGEST)
    return ScaledRows(_rounded(rows, scales.unsqueeze(-1)), scales, static=False)


def _rounded(rows: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    return (rows * divisors.reciprocal()).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _of_rows(by_expert: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The row of [experts, width] for each row of the layout: [rows, width], or [experts, 1, width]."""
    if isinstance(layout, ContiguousLayout):
        return by_expert[layout.row_experts.clamp(min=0)]
    return by_expert.unsqueeze(1)
