"""Triton's kernels that make rows for INT4 experts against their definition: on a GPU, elsewhere interpreted."""

import pytest
import torch

from kernels.expert_rows import reference
from kernels.moe_gate import NO_EXPERT
from kernels.moe_permute import NOWHERE, choose_layout
from kernels.moe_permute.layout import ContiguousLayout, Layout, MaskedLayout
from kernels.w4a8_gemm import ScaledRows
from tests.support.combinations import crossed
from tests.support.errors import relative_error

pytest.importorskip("triton")

from kernels.expert_rows import triton
from kernels.moe_permute import triton_masked

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("poisoned", "small_programs")


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are interpreted, let programs read so few choices at a time that few need several iterations."""
    if not ON_GPU:
        monkeypatch.setattr(triton_masked, "CHUNKS", (16, 64))


# Tokens, experts, choices and width: with masked layouts for few tokens, whose widths are no power of two.
# The last two have rows in several parts and more choices than a program looks at at a time.
PLACEMENTS = [(0, 4, 2, 128), (1, 256, 8, 128), (100, 3, 3, 384)]
if ON_GPU:
    PLACEMENTS += [(1, 6, 3, 2304), (40, 6, 3, 640), (70, 4, 3, 128), (3, 6, 2, 1152), (65, 12, 8, 128)]
else:
    PLACEMENTS += [(3, 6, 2, 1152), (9, 12, 8, 128)]


def random_choices(tokens: int, experts: int, choices: int, device: torch.device) -> torch.Tensor:
    return torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :choices].contiguous()


def same_layouts(found: Layout, expected: Layout) -> bool:
    if isinstance(found, MaskedLayout) and isinstance(expected, MaskedLayout):
        same = torch.equal(found.counts, expected.counts) and found.capacity == expected.capacity
    else:
        assert isinstance(found, ContiguousLayout) and isinstance(expected, ContiguousLayout)
        same = torch.equal(found.row_experts, expected.row_experts)
    return same and torch.equal(found.positions, expected.positions)


def used_rows(rows: ScaledRows, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of the rows that tokens have: others stay poisoned."""
    return rows_at(rows, layout.positions.flatten())


def rows_at(rows: ScaledRows, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.values.float().flatten(0, -2)[used], rows.scales if rows.static else rows.scales.flatten()[used]


@crossed(
    tokens__experts__choices__width=PLACEMENTS,
    pre_scaled__static=[(False, False), (True, False), (False, True), (True, True)],
)
def test_tokens_are_scaled_and_copied_to_their_experts(
    tokens: int, experts: int, choices: int, width: int, pre_scaled: bool, static: bool, device: torch.device
) -> None:
    x = torch.randn(tokens, width, device=device).bfloat16()
    pre_scale = torch.rand(width, device=device) + 0.5 if pre_scaled else None
    # Some values exceed what the static scale can hold.
    input_scale = torch.full((experts,), 0.005, device=device) if static else None
    chosen = random_choices(tokens, experts, choices, device)
    (found, layout), (expected, expected_layout) = (
        module.place_rows(x, chosen, experts, pre_scale, input_scale, 0, 0) for module in (triton, reference)
    )
    assert same_layouts(layout, expected_layout) and found.static == expected.static == static
    for one, other in zip(used_rows(found, layout), used_rows(expected, layout), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "width"), [(0, 4, 2, 128), (9, 12, 5, 640), (300 if ON_GPU else 70, 4, 3, 128)]
)
@pytest.mark.parametrize(("pre_scaled", "static"), [(False, False), (True, True)])
def test_quantized_tokens_are_copied_to_the_experts_that_are_placed(
    tokens: int, experts: int, choices: int, width: int, pre_scaled: bool, static: bool, device: torch.device
) -> None:
    x = torch.randn(tokens, width, device=device).bfloat16()
    pre_scale = torch.rand(width, device=device) + 0.5 if pre_scaled else None
    input_scale = torch.full((experts,), 0.005, device=device) if static else None
    chosen, held, first = random_choices(tokens, experts, choices, device), experts // 2, experts // 4
    (found, layout), (expected, expected_layout) = (
        module.place_quantized(module.quantize_rows(x, pre_scale, input_scale), chosen, held, first, experts - held)
        for module in (triton, reference)
    )
    assert same_layouts(layout, expected_layout) and found.static == expected.static == static
    kept = layout.positions != NOWHERE
    assert torch.equal(kept, (chosen >= first) & (chosen < first + held))
    # As tokens that are quantized where they are placed.
    whole, whole_layout = reference.place_rows(x, chosen, experts, pre_scale, input_scale, 0, 0)
    for rows, positions in ((expected, layout.positions), (whole, whole_layout.positions)):
        for one, other in zip(rows_at(found, layout.positions[kept]), rows_at(rows, positions[kept]), strict=True):
            assert torch.equal(one, other)


@crossed(tokens__experts__choices__width=PLACEMENTS, pre_scaled__static=[(False, False), (True, True)])
def test_tokens_are_quantized_for_the_experts_that_are_placed(
    tokens: int, experts: int, choices: int, width: int, pre_scaled: bool, static: bool, device: torch.device
) -> None:
    x = torch.randn(tokens, width, device=device).bfloat16()
    pre_scale = torch.rand(width, device=device) + 0.5 if pre_scaled else None
    chosen, held, first = random_choices(tokens, experts, choices, device), -(-experts // 2), experts // 4
    chosen[1::3] = NO_EXPERT
    input_scale = torch.full((held,), 0.005, device=device) if static else None
    (found, layout), (expected, expected_layout) = (
        module.place_rows(x, chosen, held, pre_scale, input_scale, first, experts - held)
        for module in (triton, reference)
    )
    assert same_layouts(layout, expected_layout) and found.static == expected.static == static
    used = layout.positions[layout.positions != NOWHERE]
    assert len(used) == int(((chosen >= first) & (chosen < first + held)).sum())
    for one, other in zip(rows_at(found, used), rows_at(expected, used), strict=True):
        assert torch.equal(one, other)


@crossed(tokens__experts__choices__width=PLACEMENTS, pre_scaled=[False, True])
def test_rows_are_gated_and_scaled_by_expert(
    tokens: int, experts: int, choices: int, width: int, pre_scaled: bool, device: torch.device
) -> None:
    layout = choose_layout(random_choices(tokens, experts, choices, device), experts)
    gate_up = torch.randn(*layout.shape, 2 * width, device=device).bfloat16()
    pre_scale = torch.rand(experts, width, device=device) + 0.5 if pre_scaled else None
    (values, scales), (expected, expected_scales) = (
        used_rows(module.swiglu_rows(gate_up, layout, pre_scale), layout) for module in (triton, reference)
    )
    assert relative_error(scales, expected_scales) < 1e-6
    # The gates' last bits differ, and so some values are rounded to e4m3's other neighbour.
    assert (values != expected).float().mean() < 0.01 if tokens else values.shape == (0, width)
    assert relative_error(values, expected) < 0.01
