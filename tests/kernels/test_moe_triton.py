"""Triton's kernels around the experts against their definitions: on a GPU, or at small sizes in the interpreter."""

import pytest
import torch

from kernels.act_quant import dequantize
from kernels.act_quant import reference as act_quant
from kernels.moe_gate import NO_EXPERT, Routing
from kernels.moe_gate import reference as moe_gate
from kernels.moe_permute import NOWHERE, ContiguousLayout, ExpandedQuantized, ExpertOutputs, MaskedLayout
from kernels.moe_permute import reference as moe_permute
from tests.support.combinations import crossed
from tests.support.errors import relative_error

pytest.importorskip("triton")

from kernels.moe_gate import triton as triton_moe_gate
from kernels.moe_permute import triton as triton_moe_permute
from kernels.moe_permute import triton_masked

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("poisoned", "small_programs")


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are interpreted, let programs read so little at a time that few choices need several of them."""
    if not ON_GPU:
        monkeypatch.setattr(triton_moe_permute, "TABLE", 1024)
        monkeypatch.setattr(triton_masked, "CHUNKS", (16, 64))


def random_choice(tokens: int, experts: int, choices: int, device: torch.device) -> torch.Tensor:
    return torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :choices].contiguous()


@crossed(
    experts__groups__allowed__choices=[(256, 8, 4, 8), (24, 4, 2, 3), (6, 1, 1, 5), (12, 12, 5, 4)],
    shares__normalize__shared=[(1, True, 1), (5, True, 0), (1, False, 2)],
)
def test_the_gate_is_the_definitions(
    experts: int, groups: int, allowed: int, choices: int, shares: int, normalize: bool, shared: int,
    device: torch.device,
) -> None:  # fmt: skip
    logits, bias = torch.randn(shares, 9, experts, device=device), torch.randn(experts, device=device)
    routing = Routing(choices, groups, allowed, normalize, 2.5, shared)
    weights, chosen = triton_moe_gate.moe_gate(logits, bias, routing)
    expected_weights, expected = moe_gate.moe_gate(logits.sum(0), bias, routing)
    order, expected_order = chosen.argsort(dim=1), expected.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
    assert relative_error(weights.gather(1, order), expected_weights.gather(1, expected_order)) < 1e-6
    # Shared experts follow the chosen ones and have a weight of 1.
    assert torch.equal(chosen[:, choices:], expected[:, choices:]) and weights[:, choices:].eq(1).all()
    counted = torch.arange(9, device=device) % 3 > 0
    _, counted_alone = triton_moe_gate.moe_gate(logits, bias, routing, counted)
    assert torch.equal(counted_alone, chosen.masked_fill(~counted.unsqueeze(1), NO_EXPERT))


# DeepSeek-V2's and V2-Lite's experts, groups and choices, and experts that do not fill the tile.
@pytest.mark.parametrize(("experts", "groups", "allowed", "choices"), [(160, 8, 3, 6), (64, 1, 1, 6), (15, 5, 2, 4)])
def test_a_softmax_gate_is_the_definitions(
    experts: int, groups: int, allowed: int, choices: int, device: torch.device
) -> None:
    logits, bias = torch.randn(3, 9, experts, device=device) * 2, torch.zeros(experts, device=device)
    routing = Routing(choices, groups, allowed, normalize=False, scaling=16.0, shared=2, softmax=True)
    weights, chosen = triton_moe_gate.moe_gate(logits, bias, routing)
    expected_weights, expected = moe_gate.moe_gate(logits.sum(0), bias, routing)
    order, expected_order = chosen.argsort(dim=1), expected.argsort(dim=1)
    assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
    assert relative_error(weights.gather(1, order), expected_weights.gather(1, expected_order)) < 1e-6


def test_the_gate_chooses_distinct_experts_whatever_the_logits(device: torch.device) -> None:
    logits = torch.randn(4, 256, device=device)
    logits[0], logits[1, 5:], logits[2] = float("nan"), float("nan"), 0.0
    routing = Routing(8, groups=8, groups_per_token=4, normalize=True, scaling=2.5, shared=0)
    _, chosen = triton_moe_gate.moe_gate(logits.unsqueeze(0), torch.zeros(256, device=device), routing)
    assert all(len(set(row)) == 8 and set(row) <= set(range(256)) for row in chosen.tolist())
    assert set(range(5)) <= set(chosen[1].tolist())


def test_no_tokens_choose_nothing(device: torch.device) -> None:
    routing = Routing(2, groups=4, groups_per_token=2, normalize=True, scaling=1.0, shared=1)
    logits, bias = torch.empty(3, 0, 8, device=device), torch.zeros(8, device=device)
    weights, chosen = triton_moe_gate.moe_gate(logits, bias, routing)
    assert weights.shape == chosen.shape == (0, 3)


# Tokens, experts, choices and width. The last three cases on a GPU, and the last one elsewhere, need several programs,
# which add up each other's counts, or several iterations of one.
EXPANSIONS = [(0, 4, 2, 128), (1, 6, 3, 2304), (1, 256, 8, 128)]
if ON_GPU:
    EXPANSIONS += [(40, 6, 3, 2304), (90, 512, 2, 128), (130, 512, 8, 128), (700, 300, 4, 2304)]
else:
    EXPANSIONS += [(20, 6, 3, 384), (12, 40, 8, 128)]

# Tokens, experts, how many of them are placed, the first of these, choices and width.
RANGES = [(1, 8, 2, 6, 3, 128), (37, 12, 3, 4, 3, 384)]
RANGES.append((70, 300, 100, 150, 4, 128) if ON_GPU else (20, 60, 20, 30, 4, 128))


def assert_same_rows(found: ExpandedQuantized, expected: ExpandedQuantized) -> None:
    """Compare the rows that tokens have. Other rows stay poisoned."""
    used = expected.positions.flatten()
    for one, other in (
        (found.rows.values.view(torch.uint8), expected.rows.values.view(torch.uint8)),
        (found.rows.scales, expected.rows.scales),
    ):
        assert one.shape == other.shape and torch.equal(one.flatten(0, -2)[used], other.flatten(0, -2)[used])


@pytest.mark.parametrize(("tokens", "experts", "choices", "width"), EXPANSIONS)
def test_tokens_are_copied_to_masked_layouts(
    tokens: int, experts: int, choices: int, width: int, device: torch.device
) -> None:
    chosen = random_choice(tokens, experts, choices, device)
    x = act_quant.quantize(torch.randn(tokens, width, device=device))
    found, expected = (
        module.expand_masked(x, chosen, experts, tokens + 1) for module in (triton_moe_permute, moe_permute)
    )
    assert isinstance(found.layout, MaskedLayout) and isinstance(expected.layout, MaskedLayout)
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.layout.counts, expected.layout.counts)
    assert_same_rows(found, expected)


@pytest.mark.parametrize(("tokens", "experts", "choices", "width"), EXPANSIONS)
def test_tokens_are_copied_to_contiguous_layouts(
    tokens: int, experts: int, choices: int, width: int, device: torch.device
) -> None:
    chosen = random_choice(tokens, experts, choices, device)
    x = act_quant.quantize(torch.randn(tokens, width, device=device))
    rows = -(-tokens * choices // 128) * 128 + experts * 128
    found, expected = (
        module.expand_contiguous(x, chosen, experts, 128, rows) for module in (triton_moe_permute, moe_permute)
    )
    assert isinstance(found.layout, ContiguousLayout) and isinstance(expected.layout, ContiguousLayout)
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.layout.row_experts, expected.layout.row_experts)
    assert_same_rows(found, expected)


def test_many_choices_of_few_experts_are_placed(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a rank has them that shares its experts with many: their number does not limit a program's choices."""
    monkeypatch.setattr(triton_moe_permute, "TABLE", 1 << 15)
    chosen, rows = random_choice(512, 4, 4, device), 512 * 4 + 4 * 128
    found, expected = (each.contiguous_layout(chosen, 4, 128, rows) for each in (triton_moe_permute, moe_permute))
    assert torch.equal(found.positions, expected.positions)
    assert torch.equal(found.row_experts, expected.row_experts)


@crossed(
    tokens__experts__held__first__choices__width=[
        *((tokens, experts, experts, 0, choices, width) for tokens, experts, choices, width in EXPANSIONS),
        *RANGES,
    ],
    dtype=[torch.float32, torch.bfloat16],
)
def test_tokens_are_copied_in_order_of_their_experts(
    tokens: int, experts: int, held: int, first: int, choices: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    chosen = random_choice(tokens, experts, choices, device)
    x = torch.randn(tokens, width, device=device).to(dtype)
    found, expected = (each.expand(x, chosen, held, first) for each in (triton_moe_permute, moe_permute))
    assert torch.equal(found.ends, expected.ends) and found.ends.dtype == expected.ends.dtype
    assert torch.equal(found.positions, expected.positions)
    placed = int(expected.ends[-1])
    assert len(found.rows) == tokens * choices and torch.equal(found.rows[:placed], expected.rows[:placed])


@pytest.mark.parametrize(("tokens", "experts", "held", "first", "choices", "width"), [*RANGES, (17, 8, 8, 0, 3, 256)])
@pytest.mark.parametrize("masked", [False, True])
def test_choices_of_experts_elsewhere_and_padding_have_no_row(
    tokens: int, experts: int, held: int, first: int, choices: int, width: int, masked: bool, device: torch.device
) -> None:
    chosen = random_choice(tokens, experts, choices, device)
    chosen[1::3] = NO_EXPERT
    x = act_quant.quantize(torch.randn(tokens, width, device=device))
    modules = (triton_moe_permute, moe_permute)
    if masked:
        found, expected = (
            each.expand_masked(x, chosen, held, tokens + 1, 0, first, experts - held) for each in modules
        )
        assert torch.equal(found.layout.counts, expected.layout.counts)
    else:
        rows = -(-tokens * choices // 128) * 128 + held * 128
        found, expected = (each.expand_contiguous(x, chosen, held, 128, rows, first) for each in modules)
        assert torch.equal(found.layout.row_experts, expected.layout.row_experts)
    assert torch.equal(found.positions, expected.positions)
    kept = found.positions != NOWHERE
    assert torch.equal(kept, (chosen >= first) & (chosen < first + held))
    used = expected.positions[kept]
    assert torch.equal(dequantize(found.rows).flatten(0, -2)[used], dequantize(expected.rows).flatten(0, -2)[used])
    outputs = ExpertOutputs(
        torch.randn(*found.layout.shape, width, device=device), found.positions, torch.rand(chosen.shape, device=device)
    )
    part = torch.randn(tokens // 2, width, device=device)
    sums, expected_sums = (each.combine(outputs, part, tokens // 3) for each in modules)
    assert relative_error(sums, expected_sums) < 1e-6


@pytest.mark.parametrize("tokens", [0, 1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_shared", [False, True])
def test_experts_outputs_are_added_up_by_weight(
    tokens: int, dtype: torch.dtype, with_shared: bool, device: torch.device
) -> None:
    positions, weights = random_choice(tokens, 70, 3, device), torch.randn(tokens, 3, device=device)
    rows = torch.randn(70, 1200, device=device).to(dtype)
    shared = torch.randn(tokens, 1200, device=device).to(dtype) if with_shared else None
    outputs = ExpertOutputs(rows, positions, weights, shared)
    found, expected = (module.combine(outputs) for module in (triton_moe_permute, moe_permute))
    assert relative_error(found, expected) < (1e-6 if dtype == torch.float32 else 5e-3)
    # Sums may take the place of the shared ones.
    again = triton_moe_permute.combine(outputs, out=shared)
    assert torch.equal(again, found) and (shared is None or again is shared)
