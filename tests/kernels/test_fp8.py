import pytest
import torch

from kernels.act_quant import Quantized, dequantize, empty_quantized, quantize
from kernels.block_quant import quantize_blocks
from kernels.fp8_gemm import BlockScaled, block_scaled, deep_gemm, fp8_gemm, make_workspace
from kernels.grouped_gemm import grouped_fp8_gemm
from kernels.moe_permute import (
    ContiguousLayout,
    ExpertOutputs,
    MaskedLayout,
    choose_layout,
    combine,
    expand_contiguous,
    expand_masked,
    expand_quantized,
)
from kernels.swiglu import swiglu, swiglu_quantize


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def random_weight(*shape: int) -> tuple[torch.Tensor, BlockScaled]:
    weight = torch.randn(shape) * torch.logspace(-1, 1, shape[-1])
    parts = [quantize_blocks(part) for part in weight.view(-1, *shape[-2:])]
    values = torch.stack([values for values, _ in parts]).view(shape)
    scales = torch.stack([scales for _, scales in parts])
    return weight, block_scaled(values, scales.view(*shape[:-2], *scales.shape[1:]))


@pytest.mark.parametrize("rows", [0, 1, 5, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_group_keeps_e4m3_precision_of_its_own_scale(rows: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 384) * torch.logspace(-6, 6, 384)).to(dtype)
    quantized = quantize(x)
    difference = (dequantize(quantized) - x.float()).abs().unflatten(1, (3, 128))
    assert (difference <= x.float().abs().unflatten(1, (3, 128)).amax(2, keepdim=True) * 2**-4).all()
    assert quantized.values.float().abs().unflatten(1, (3, 128)).amax(2).eq(448).all()


def test_zeros_stay_zeros() -> None:
    assert not dequantize(quantize(torch.zeros(3, 128))).any()


def test_columns_of_scales_begin_every_sixteen_bytes() -> None:
    assert [empty_quantized(rows, 256, device=torch.device("cpu")).scales.stride(1) for rows in (0, 1, 4, 5)] == [
        4, 4, 4, 8,
    ]  # fmt: skip


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(0, 128, 128), (1, 192, 128), (7, 576, 384)])
def test_a_quantized_product_is_near_the_exact_one(rows: int, outputs: int, inputs: int) -> None:
    x = torch.randn(rows, inputs)
    weight, quantized = random_weight(outputs, inputs)
    found = fp8_gemm(quantize(x), quantized, make_workspace(x.device))
    assert found.shape == (rows, outputs) and found.dtype == torch.bfloat16
    assert not rows or error(found, x @ weight.t()) < 0.06


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("expand", [expand_contiguous, expand_masked])
def test_a_token_meets_its_experts_whatever_the_layout(tokens: int, expand: type) -> None:
    x, experts = torch.randn(tokens, 256), torch.rand(tokens, 6).argsort(dim=1)[:, :3].contiguous()
    weights = torch.rand(tokens, 3)
    exact, quantized = random_weight(6, 128, 256)
    expanded = expand(quantize(x), experts, 6)
    rows = grouped_fp8_gemm(expanded.rows, quantized, expanded.layout)
    expected = torch.einsum("ti,tkoi,tk->to", x, exact[experts], weights)
    found = combine(ExpertOutputs(rows, expanded.positions, weights))
    assert found.shape == (tokens, 128)
    assert not tokens or error(found, expected) < 0.06


def test_an_aligned_tile_of_rows_has_one_expert() -> None:
    experts = torch.randint(0, 9, (300, 2))
    layout = expand_contiguous(quantize(torch.randn(300, 128)), experts, 9).layout
    assert isinstance(layout, ContiguousLayout)
    tiles = layout.row_experts.view(-1, 128)
    assert ((tiles == tiles[:, :1]) | (tiles == -1)).all()
    used = layout.row_experts[layout.positions.flatten()]
    assert used.tolist() == experts.flatten().tolist() and len(layout.positions.unique()) == 600


@pytest.mark.parametrize(
    ("tokens", "experts", "masked"), [(1, 8, True), (256, 8, True), (257, 8, False), (129, 289, False)]
)
def test_layouts_are_masked_while_experts_have_few_rows(tokens: int, experts: int, masked: bool) -> None:
    chosen = torch.rand(tokens, experts).argsort(dim=1)[:, :2].contiguous()
    expanded = expand_quantized(quantize(torch.randn(tokens, 128)), chosen, experts)
    assert isinstance(expanded.layout, MaskedLayout) == masked


def test_a_masked_layout_has_room_for_one_popular_expert() -> None:
    layout = expand_masked(quantize(torch.randn(50, 128)), torch.full((50, 1), 2), 4).layout
    assert isinstance(layout, MaskedLayout) and layout.expected_rows == 13
    assert layout.counts.tolist() == [0, 0, 50, 0]
    assert layout.positions.flatten().tolist() == list(range(2 * layout.capacity, 2 * layout.capacity + 50))


@pytest.mark.parametrize("shared", [1, 2])
def test_shared_experts_do_not_count_for_the_expected_rows(shared: int) -> None:
    x, routed = quantize(torch.randn(256, 128)), torch.rand(256, 8).argsort(dim=1)[:, :2]
    experts = torch.cat([routed, torch.arange(8, 8 + shared).expand(256, shared)], dim=1)
    layout = expand_quantized(x, experts, 8 + shared, shared).layout
    assert isinstance(layout, MaskedLayout) and layout.expected_rows == 64
    assert layout.counts[8:].tolist() == [256] * shared
    assert isinstance(expand_quantized(x, experts, 8 + shared).layout, ContiguousLayout)


def test_shared_experts_do_not_count_for_the_memory() -> None:
    x, routed = quantize(torch.randn(256, 128)), torch.rand(256, 288).argsort(dim=1)[:, :8]
    experts = torch.cat([routed, torch.full((256, 1), 288)], dim=1)
    assert isinstance(expand_quantized(x, experts, 289, shared=1).layout, MaskedLayout)
    assert isinstance(expand_quantized(x, experts, 289).layout, ContiguousLayout)


@pytest.mark.parametrize(("ranks", "copies"), [(2, 4), (4, 8), (8, 4)])
def test_large_steps_with_copies_of_experts_are_not_padded(ranks: int, copies: int) -> None:
    slots, tokens = 256 // ranks + copies, 256 * ranks
    experts = torch.rand(tokens, slots * ranks).argsort(dim=1)[:, :8]
    assert isinstance(choose_layout(experts, slots, elsewhere=slots * (ranks - 1)), MaskedLayout)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_gating_and_quantizing_at_once_rounds_once(rows: int) -> None:
    x = torch.randn(rows, 512)
    expected: Quantized = quantize(swiglu(x))
    found = swiglu_quantize(x)
    assert torch.equal(found.values.float(), expected.values.float()) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize(("outputs", "inputs", "worth"), [(7168, 2048, True), (1536, 256, False), (256, 512, False)])
def test_small_weights_are_not_worth_deep_gemms_compilations(outputs: int, inputs: int, worth: bool) -> None:
    assert deep_gemm.is_faster(2048, outputs, inputs, fills_chip=True) == worth
