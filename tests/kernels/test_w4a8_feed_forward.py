"""The experts' whole feed-forward layers with INT4 weights: the definition, and the kernel for Hopper against it."""

import pytest
import torch
from torch.nn import functional

from kernels.moe_permute.layout import PADDING, ContiguousLayout, Layout, MaskedLayout
from kernels.w4a8_gemm import (
    Int4Experts,
    Int4FeedForward,
    ScaledRows,
    gate_and_up,
    int4_experts,
    int4_feed_forward,
    pack_tiles,
    reference,
    take_turns,
    w4a8_feed_forward,
)
from kernels.w4a8_gemm.reference import dequantize
from kernels.w4a8_gemm.tiling import NARROW, TILINGS, Tiling
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

E4M3 = torch.float8_e4m3fn
# Hidden size and width: in whole tiles of outputs and not.
SHAPES = [(128, 128), (256, 384), (896, 256), (2048, 1152)]
MASKED = [(64, [0, 1, 64, 17, 33, 50]), (256, [200, 0, 256, 172, 30, 11])]


def random_experts(experts: int, outputs: int, inputs: int, device: str, lowest: int = -7) -> Int4Experts:
    """Weights of variance 1 / inputs."""
    integers = torch.randint(lowest, 8, (experts, outputs, inputs), dtype=torch.int8, device=device)
    packed = (integers[..., 0::2] & 15) | (integers[..., 1::2] << 4)
    scales = (torch.rand(experts, outputs, inputs // 128, device=device) + 0.5) / (4.5 * inputs**0.5)
    return int4_experts(pack_tiles(packed, scales))


def random_feed_forward(experts: int, hidden: int, width: int, device: str, lowest: int = -7) -> Int4FeedForward:
    """Its static scales suit inputs of variance 1; the largest of what is gated saturate."""
    pre_scales, input_scales = torch.rand(experts, width, device=device) + 0.5, torch.rand(experts, device=device) + 1
    return int4_feed_forward(
        random_experts(experts, 2 * width, hidden, device, lowest),
        random_experts(experts, hidden, width, device, lowest),
        input_scales / 200,
        pre_scales,
    )


def random_rows(layout: Layout, experts: int, hidden: int, device: str) -> ScaledRows:
    values = (torch.randn(*layout.shape, hidden, device=device) * 64).to(E4M3)
    return ScaledRows(values, torch.full((experts,), 1 / 64, device=device), static=True)


def masked(counts: list[int] | torch.Tensor, capacity: int, device: str) -> MaskedLayout:
    return MaskedLayout(torch.zeros(1, 1), torch.as_tensor(counts, dtype=torch.int32, device=device), capacity)


def few_touched(experts: int, touched: int, device: str) -> MaskedLayout:
    """Some of the experts have one to eight rows each, the others none."""
    counts = torch.zeros(experts, dtype=torch.int32)
    counts[torch.randperm(experts)[:touched]] = torch.randint(1, 9, (touched,), dtype=torch.int32)
    return masked(counts, 64, device)


def contiguous(device: str) -> ContiguousLayout:
    """Five experts: one has no rows, the others' last tiles have padding. The last two tiles belong to none."""
    used = torch.tensor([20, 0, 1280, 198, 60])
    tiles = -(-used // 128)
    row_experts = torch.arange(5).repeat_interleave(tiles * 128)
    place = torch.arange(len(row_experts)) - ((tiles.cumsum(0) - tiles) * 128)[row_experts]
    row_experts[place >= used[row_experts]] = PADDING
    row_experts = torch.cat([row_experts, torch.full((256,), PADDING)]).int().to(device)
    return ContiguousLayout(torch.zeros(1, 1, dtype=torch.int64), row_experts)


def test_outputs_that_took_turns_are_told_apart() -> None:
    gate_up = torch.arange(48).unsqueeze(1).expand(48, 3)
    turns = take_turns(gate_up)
    assert turns[:17, 1].tolist() == [*range(8), *range(24, 32), 8]
    gate, up = gate_and_up(turns.t())
    assert torch.equal(gate, gate_up[:24].t()) and torch.equal(up, gate_up[24:].t())


@pytest.mark.parametrize("layout", [masked([3, 0, 64, 5, 1], 64, "cpu"), contiguous("cpu")], ids=["masked", "sorted"])
def test_each_row_passes_through_its_expert(layout: Layout) -> None:
    experts = random_feed_forward(5, 256, 128, "cpu")
    x = random_rows(layout, 5, 256, "cpu")
    found = w4a8_feed_forward(x, experts, layout)
    assert found.shape == x.values.shape and found.dtype == torch.bfloat16
    for expert, at in used_rows(layout):
        gate, up = gate_and_up(x.values[at].float() / 64 @ dequantize(experts.gate_up.tiles[expert]).t())
        scaled = functional.silu(gate) * up * experts.factors[expert]
        inner = scaled.clamp(-448, 448).to(E4M3).float() * experts.input_scales[expert]
        assert scaled.abs().max() > 100
        assert relative_error(found[at], inner @ dequantize(experts.down.tiles[expert]).t()) < 5e-3


def test_no_rows_give_none() -> None:
    layout = MaskedLayout(torch.zeros(0, 1), torch.zeros(2, dtype=torch.int32), 0)
    experts = random_feed_forward(2, 128, 128, "cpu")
    assert w4a8_feed_forward(random_rows(layout, 2, 128, "cpu"), experts, layout).shape == (2, 0, 128)


def used_rows(layout: Layout) -> list[tuple[int, tuple[torch.Tensor, ...]]]:
    """For each expert that has rows, where they lie."""
    if isinstance(layout, ContiguousLayout):
        rows = [(expert, ((layout.row_experts == expert).nonzero().flatten(),)) for expert in range(5)]
        return [(expert, at) for expert, at in rows if len(at[0])]
    counts = enumerate(layout.counts.tolist())
    return [(e, (torch.full((count,), e), torch.arange(count))) for e, count in counts if count]


def check(experts: Int4FeedForward, layout: Layout, tiling: Tiling | None) -> None:
    """Against the definition, twice: the kernel counts its progress, and leaves zeros."""
    from kernels.w4a8_gemm import warpgroups

    x = random_rows(layout, experts.down.shape[0], experts.down.shape[1], "cuda")
    expected = reference.w4a8_feed_forward(x, experts, layout)
    for _ in range(2):
        found = warpgroups.w4a8_feed_forward(x, experts, layout, tiling)
        torch.cuda.synchronize()
        assert not experts.progress.any() and not experts.gate_up.drawn.any()
        for _, at in used_rows(layout):
            # Sums differ in their last bits, and so some values are rounded to e4m3's other neighbour.
            assert relative_error(found[at], expected[at]) < 2e-2
        if isinstance(layout, MaskedLayout):
            unused = torch.arange(layout.capacity, device="cuda") >= layout.counts.unsqueeze(1)
            # Nothing is written beyond an expert's rows.
            assert found[unused].isnan().all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
@pytest.mark.parametrize(("capacity", "counts"), MASKED)
def test_a_masked_layout(counts: list[int], capacity: int, hidden: int, width: int, tiling: Tiling) -> None:
    check(random_feed_forward(len(counts), hidden, width, "cuda"), masked(counts, capacity, "cuda"), tiling)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("hidden", "width"), [(512, 512), (1024, 1536), (7168, 512)])
@pytest.mark.parametrize("lowest", [-7, -8])
@pytest.mark.parametrize(("capacity", "counts"), MASKED)
def test_narrow_tiles(counts: list[int], capacity: int, lowest: int, hidden: int, width: int) -> None:
    check(random_feed_forward(len(counts), hidden, width, "cuda", lowest), masked(counts, capacity, "cuda"), NARROW)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
def test_a_contiguous_layout(hidden: int, width: int) -> None:
    check(random_feed_forward(5, hidden, width, "cuda"), contiguous("cuda"), None)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_weights_of_minus_eight(tiling: Tiling) -> None:
    check(random_feed_forward(3, 256, 512, "cuda", lowest=-8), masked([60, 0, 5], 64, "cuda"), tiling)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("experts", [1, 40, 512])
def test_any_number_of_experts(experts: int) -> None:
    counts = torch.randint(0, 65, (experts,))
    check(random_feed_forward(experts, 128, 128, "cuda"), masked(counts, 64, "cuda"), None)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("tiling", [NARROW, TILINGS[0], TILINGS[-1]], ids=str)
@pytest.mark.parametrize("experts", [20, 64, 100])
@pytest.mark.parametrize("touched", range(9))
def test_few_experts_that_have_rows(touched: int, experts: int, tiling: Tiling) -> None:
    check(random_feed_forward(experts, 1024, 512, "cuda"), few_touched(experts, touched, "cuda"), tiling)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tiling", [NARROW, TILINGS[0], TILINGS[-1]], ids=str)
def test_the_number_of_ctas_changes_nothing(tiling: Tiling) -> None:
    """Few copies leave more multiprocessors to others than many do."""
    from kernels.w4a8_gemm import warpgroups

    experts = random_feed_forward(64, 2048, 1024, "cuda")
    for counts in (few_touched(64, 5, "cuda").counts, torch.randint(0, 65, (64,)).int()):
        few, many = (MaskedLayout(torch.zeros(copies, 1), counts.to("cuda"), 64) for copies in (1, 10_000))
        x = random_rows(few, 64, 2048, "cuda")
        used = torch.arange(64, device="cuda") < few.counts.unsqueeze(1)
        found = [warpgroups.w4a8_feed_forward(x, experts, layout, tiling)[used] for layout in (few, many)]
        assert torch.equal(*found)


@pytest.mark.gpu
@on_hopper
def test_rows_of_deepseek_r1_come_out_the_same_every_time() -> None:
    from kernels.w4a8_gemm import warpgroups

    experts = random_feed_forward(32, 7168, 2048, "cuda")
    layouts = [masked(torch.randint(0, tokens + 1, (32,)), 64, "cuda") for tokens in (16, 40, 64)]
    # Gate and up of up to seven experts, with one tile of rows each, are less than a tile for each multiprocessor.
    layouts += [few_touched(32, touched, "cuda") for touched in (1, 2, 4, 7, 8, 9)]
    for layout, tiling in ((layout, tiling) for layout in layouts for tiling in (None, NARROW)):
        x = random_rows(layout, 32, 7168, "cuda")
        used = torch.arange(64, device="cuda") < layout.counts.unsqueeze(1)
        first = warpgroups.w4a8_feed_forward(x, experts, layout, tiling)[used]
        assert relative_error(first, reference.w4a8_feed_forward(x, experts, layout)[used]) < 1e-2
        for _ in range(50):
            assert torch.equal(warpgroups.w4a8_feed_forward(x, experts, layout, tiling)[used], first)
