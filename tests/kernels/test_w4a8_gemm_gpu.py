"""INT4 experts on Hopper against their definition."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.moe_permute.layout import PADDING, ContiguousLayout, Layout, MaskedLayout
from kernels.w4a8_gemm import Int4Experts, ScaledRows, int4_experts, pack_tiles, profiled, reference, warpgroups
from kernels.w4a8_gemm.tiling import TILINGS, Tiling
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Outputs and inputs.
SHAPES = [(64, 128), (256, 256), (320, 896), (7168, 2048)]
by_group = pytest.mark.parametrize("group", [128, 32])


def masked(counts: list[int], capacity: int, tokens: int = 1) -> MaskedLayout:
    positions = torch.zeros(tokens, len(counts), dtype=torch.int64)
    return MaskedLayout(positions, torch.tensor(counts, dtype=torch.int32), capacity)


def random_experts(experts: int, outputs: int, inputs: int, group: int = 128, *, lowest: int = -7) -> Int4Experts:
    integers = torch.randint(lowest, 8, (experts, outputs, inputs), dtype=torch.int8, device="cuda")
    packed = (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)
    return int4_experts(pack_tiles(packed, torch.rand(experts, outputs, inputs // group, device="cuda") + 0.1))


def random_rows(layout: Layout, experts: int, inputs: int, static: bool) -> ScaledRows:
    values = torch.randn(*layout.shape, inputs, device="cuda").to(torch.float8_e4m3fn)
    return ScaledRows(values, torch.rand(experts if static else layout.shape, device="cuda") + 0.1, static)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@by_group
@pytest.mark.parametrize(("capacity", "counts"), [(64, [0, 1, 64, 17, 33, 0]), (256, [200, 0, 256, 129, 3, 1])])
def test_a_masked_layout(
    counts: list[int], capacity: int, group: int, outputs: int, inputs: int, static: bool, tiling: Tiling
) -> None:
    weight, layout = random_experts(len(counts), outputs, inputs, group), masked(counts, capacity)
    layout = MaskedLayout(layout.positions, layout.counts.cuda(), capacity)
    x = random_rows(layout, len(counts), inputs, static)
    found, expected = (module.w4a8_grouped_gemm(x, weight, layout, *more) for module, more in both(tiling))
    for expert, count in enumerate(counts):
        assert relative_error(found[expert, :count], expected[expert, :count]) < 5e-3
        # Nothing is written beyond an expert's rows.
        assert found[expert, count:].isnan().all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@by_group
def test_a_contiguous_layout(group: int, outputs: int, inputs: int, static: bool) -> None:
    experts = 5
    row_experts = torch.arange(experts).repeat_interleave(torch.tensor([128, 0, 1280, 256, 128]))
    row_experts[-28:] = row_experts[100:128] = PADDING
    row_experts = torch.cat([row_experts, torch.full((256,), PADDING)]).int().cuda()
    layout = ContiguousLayout(torch.zeros(1, 1, dtype=torch.int64), row_experts)
    weight, x = random_experts(experts, outputs, inputs, group), random_rows(layout, experts, inputs, static)
    found, expected = (module.w4a8_grouped_gemm(x, weight, layout, *more) for module, more in both(None))
    used = row_experts >= 0
    assert relative_error(found[used], expected[used]) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@by_group
def test_weights_of_minus_eight(group: int, tiling: Tiling) -> None:
    weight = random_experts(3, 256, 512, group, lowest=-8)
    assert weight.has_minimum
    layout = MaskedLayout(torch.zeros(1, 1), torch.tensor([60, 0, 5], dtype=torch.int32, device="cuda"), 64)
    x = random_rows(layout, 3, 512, False)
    found, expected = (module.w4a8_grouped_gemm(x, weight, layout, *more) for module, more in both(tiling))
    assert relative_error(found[0, :60], expected[0, :60]) < 5e-3
    assert relative_error(found[2, :5], expected[2, :5]) < 5e-3


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("experts", [1, 40, 512])
def test_any_number_of_experts(experts: int) -> None:
    weight = random_experts(experts, 64, 256)
    counts = torch.randint(0, 60, (experts,), dtype=torch.int32, device="cuda")
    layout = MaskedLayout(torch.zeros(1, 1), counts, 64)
    x = random_rows(layout, experts, 256, False)
    used = torch.arange(64, device="cuda") < counts.unsqueeze(1)
    found, expected = (module.w4a8_grouped_gemm(x, weight, layout, *more) for module, more in both(None))
    assert relative_error(found[used], expected[used]) < 5e-3


@pytest.mark.gpu
@on_hopper
@by_group
@pytest.mark.parametrize("touched", range(9))
def test_few_experts_that_have_rows(touched: int, group: int) -> None:
    weight, counts = random_experts(64, 320, 896, group), torch.zeros(64, dtype=torch.int32, device="cuda")
    counts[torch.randperm(64)[:touched]] = torch.randint(1, 9, (touched,), dtype=torch.int32, device="cuda")
    layout = MaskedLayout(torch.zeros(1, 1), counts, 64)
    x = random_rows(layout, 64, 896, False)
    used = torch.arange(64, device="cuda") < counts.unsqueeze(1)
    found, expected = (module.w4a8_grouped_gemm(x, weight, layout, *more) for module, more in both(None))
    assert used.sum() == counts.sum() and (not touched or relative_error(found[used], expected[used]) < 5e-3)


@pytest.mark.gpu
@on_hopper
def test_profiled_weights_multiply_as_before(tmp_path: Path) -> None:
    weight, layout = random_experts(4, 256, 512), masked([3, 0, 64, 20], 64)
    layout = MaskedLayout(layout.positions, layout.counts.cuda(), 64)
    x = random_rows(layout, 4, 512, static=True)
    again = profiled(weight, tmp_path)
    assert profiled(weight, tmp_path).tilings == again.tilings and len(list(tmp_path.iterdir())) == 1
    found, expected = (warpgroups.w4a8_grouped_gemm(x, each, layout) for each in (again, weight))
    assert torch.equal(found[2], expected[2])


def both(tiling: Tiling | None) -> tuple[tuple[ModuleType, tuple[Tiling, ...]], ...]:
    """Ours, and the definition, which needs no tiling."""
    return (warpgroups, () if tiling is None else (tiling,)), (reference, ())
