"""Rows for INT4 experts: placed, scaled, and quantized with one scale a row or an expert."""

import pytest
import torch
from torch.nn import functional

from kernels.expert_rows import place_rows, swiglu_rows
from kernels.moe_permute.layout import Layout, MaskedLayout
from kernels.w4a8_gemm import ScaledRows, take_turns
from tests.support.errors import relative_error

EXPERTS, WIDTH = 8, 256


def random_choices(tokens: int) -> torch.Tensor:
    return torch.rand(tokens, EXPERTS).argsort(dim=1)[:, :3].contiguous()


def values_at(rows: ScaledRows, positions: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Dequantized: [tokens, k, width]."""
    scales = rows.scales[experts] if rows.static else rows.scales.flatten()[positions]
    return rows.values.float().flatten(0, -2)[positions] * scales.unsqueeze(2)


@pytest.mark.parametrize("tokens", [0, 1, 40, 400])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pre_scaled", [False, True])
def test_every_expert_reads_its_tokens(tokens: int, static: bool, pre_scaled: bool) -> None:
    x, choices = torch.randn(tokens, WIDTH), random_choices(tokens)
    pre_scale = torch.rand(WIDTH) + 0.5 if pre_scaled else None
    rows, layout = place_rows(x, choices, EXPERTS, pre_scale, torch.full((EXPERTS,), 0.03) if static else None)
    assert rows.static is static and rows.values.shape == (*layout.shape, WIDTH)
    expected = x if pre_scale is None else x * pre_scale
    found = values_at(rows, layout.positions, choices)
    assert relative_error(found, expected.unsqueeze(1).expand_as(found)) < 0.04


@pytest.mark.parametrize("tokens", [1, 40, 400])
@pytest.mark.parametrize("scaled", [False, True])
def test_gates_are_scaled_by_expert(tokens: int, scaled: bool) -> None:
    choices = random_choices(tokens)
    _, layout = place_rows(torch.randn(tokens, WIDTH), choices, EXPERTS, None, None)
    gate_up = torch.randn(2 * WIDTH, *layout.shape).bfloat16()
    pre_scale = torch.rand(EXPERTS, WIDTH) + 0.5 if scaled else None
    gate, up = gate_up.float().flatten(1)[:, layout.positions].movedim(0, 2).chunk(2, dim=2)
    expected = functional.silu(gate) * up * (1 if pre_scale is None else pre_scale[choices])
    found = swiglu_rows(take_turns(gate_up).movedim(0, -1).contiguous(), layout, pre_scale)
    assert relative_error(values_at(found, layout.positions, choices), expected) < 0.04


def largest_of(x: torch.Tensor, input_scale: torch.Tensor | None) -> tuple[float, Layout]:
    rows, layout = place_rows(x, torch.zeros(1, 1, dtype=torch.int64), 1, None, input_scale)
    assert isinstance(layout, MaskedLayout)
    return float(rows.values[0, 0].float().abs().max()), layout


def test_what_exceeds_a_static_scale_saturates() -> None:
    assert largest_of(torch.full((1, WIDTH), 1e6), torch.ones(1))[0] == 448


def test_a_row_of_zeros_stays_zero() -> None:
    assert largest_of(torch.zeros(1, WIDTH), None)[0] == 0
