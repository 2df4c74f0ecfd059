"""The kernel of few tokens' INT4 experts, against the definition; which layouts take it."""

from dataclasses import replace

import pytest
import torch

from kernels.hopper import processors
from kernels.moe_permute.layout import MaskedLayout
from kernels.w4a8_gemm import Int4FeedForward, few_rows, reference
from tests.kernels.test_w4a8_feed_forward import random_feed_forward, random_rows
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Hidden size and width: fewer groups of inputs than warps share, strips that fill no unit, whole and divided experts.
SHAPES = [(128, 128), (256, 384), (1152, 640), (2048, 1152), (7168, 512)]
# Rows of each expert: all tokens choose the same ones, one row, none at all, some of every number.
COUNTS = [[8, 8, 0, 8], [0, 0, 1], [0, 0], [1, 0, 2, 3, 4, 0, 5, 6, 7, 8, 1, 1], [1] * 8]


def layout_of(counts: list[int], device: str = "cuda", capacity: int = 64) -> MaskedLayout:
    """As of eight tokens."""
    rows = torch.tensor(counts, dtype=torch.int32, device=device)
    return MaskedLayout(torch.zeros(few_rows.MOST_ROWS, len(counts), dtype=torch.int64), rows, capacity)


def check(experts: Int4FeedForward, layout: MaskedLayout, ctas: int | None = None) -> None:
    """Twice, since the kernel counts what is stored, and leaves zeros."""
    x = random_rows(layout, experts.down.shape[0], experts.down.shape[1], "cuda")
    expected = reference.w4a8_feed_forward(x, experts, layout)
    used = torch.arange(layout.capacity, device="cuda") < layout.counts.unsqueeze(1)
    for _ in range(2):
        found = few_rows.w4a8_feed_forward(x, experts, layout, ctas)
        torch.cuda.synchronize()
        assert not experts.progress.any()
        # Sums differ in their last bits, and so some values are rounded to e4m3's other neighbour.
        assert not used.any() or relative_error(found[used], expected[used]) < 2e-2
        assert found[~used].isnan().all(), "nothing is written beyond an expert's rows"


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_each_row_passes_through_its_expert(counts: list[int], hidden: int, width: int) -> None:
    check(random_feed_forward(len(counts), hidden, width, "cuda"), layout_of(counts))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ctas", [1, 3, 60, 132])
def test_any_number_of_ctas(ctas: int) -> None:
    check(random_feed_forward(5, 1024, 512, "cuda"), layout_of([8, 0, 1, 3, 1]), ctas)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
def test_a_cta_waits_for_one_whose_multiprocessor_another_kernel_holds() -> None:
    experts, layout = random_feed_forward(5, 1024, 512, "cuda"), layout_of([8, 0, 1, 3, 1])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # Cycles: some 0.1 s on one of them, until behind the launches below.
        torch.cuda._sleep(200_000_000)
    check(experts, layout, processors(torch.device("cuda")))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("experts", [1, 40, 512])
def test_any_number_of_experts(experts: int) -> None:
    check(random_feed_forward(experts, 256, 128, "cuda"), layout_of(torch.randint(0, 9, (experts,)).tolist()))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("experts", "width"), [(64, 512), (16, 2048)])
def test_the_number_of_ctas_and_replays_change_nothing(experts: int, width: int) -> None:
    weights = random_feed_forward(experts, 7168, width, "cuda")
    for touched in (1, 2, 5, 8, 16):
        counts = torch.zeros(experts, dtype=torch.int32)
        counts[torch.randperm(experts)[:touched]] = torch.randint(1, 9, (touched,), dtype=torch.int32)
        layout = layout_of(counts.tolist())
        x = random_rows(layout, experts, 7168, "cuda")
        used = torch.arange(64, device="cuda") < layout.counts.unsqueeze(1)
        first = few_rows.w4a8_feed_forward(x, weights, layout)[used]
        assert relative_error(first, reference.w4a8_feed_forward(x, weights, layout)[used]) < 2e-2
        for ctas in (96, 124, 132):
            # Kernels are not loaded while a graph is captured.
            few_rows.w4a8_feed_forward(x, weights, layout, ctas)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed = few_rows.w4a8_feed_forward(x, weights, layout, ctas)
            for _ in range(20):
                graph.replay()
                assert torch.equal(replayed[used], first)


@pytest.mark.gpu
@on_hopper
def test_counts_that_a_graph_finds_may_change_between_replays() -> None:
    weights, layout = random_feed_forward(32, 1024, 512, "cuda"), layout_of([1] * 32)
    x = random_rows(layout, 32, 1024, "cuda")
    few_rows.w4a8_feed_forward(x, weights, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = few_rows.w4a8_feed_forward(x, weights, layout)
    for _ in range(20):
        layout.counts.copy_(torch.randint(0, 9, (32,)) * torch.randint(0, 2, (32,)))
        used = torch.arange(64, device="cuda") < layout.counts.unsqueeze(1)
        graph.replay()
        expected = reference.w4a8_feed_forward(x, weights, layout)[used]
        assert not used.any() or relative_error(found[used], expected) < 2e-2


@pytest.mark.gpu
@on_hopper
def test_the_strips_of_a_unit_change_nothing() -> None:
    weights, layout = random_feed_forward(12, 1152, 640, "cuda"), layout_of([1, 0, 2, 3, 4, 0, 5, 6, 7, 8, 1, 1])
    x, used = random_rows(layout, 12, 1152, "cuda"), torch.arange(64, device="cuda") < layout.counts.unsqueeze(1)
    found = [few_rows.w4a8_feed_forward(x, weights, layout, strips=strips)[used] for strips in (1, 2, 3)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize(("tokens", "taken"), [(1, True), (8, True), (9, False)])
def test_few_tokens_take_it(tokens: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    experts, layout = random_feed_forward(4, 256, 128, "cpu"), layout_of([1, 0, 0, 0], "cpu")
    layout = replace(layout, positions=torch.zeros(tokens, 2, dtype=torch.int64))
    assert few_rows.takes(experts, layout) == taken


def test_weights_of_minus_eight_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    experts = random_feed_forward(4, 256, 128, "cpu", lowest=-8)
    assert experts.down.has_minimum and not few_rows.takes(experts, layout_of([1, 0, 0, 0], "cpu"))


def test_experts_of_which_other_ranks_have_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    experts, layout = random_feed_forward(4, 256, 128, "cpu"), layout_of([1, 0, 0, 0], "cpu")
    assert few_rows.takes(experts, layout) and not few_rows.takes(experts, replace(layout, elsewhere=12))


@pytest.mark.parametrize(("copies", "taken"), [(16, True), (32, False)])
def test_what_takes_longer_than_in_tiles_does_not(copies: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "is_hopper", lambda device: True)
    monkeypatch.setattr(Int4FeedForward, "expert_bytes", 5_500_000)
    experts, layout = random_feed_forward(4, 256, 128, "cpu"), layout_of([1, 0, 0, 0], "cpu")
    layout = replace(layout, positions=torch.zeros(copies // 8, 8, dtype=torch.int64))
    assert few_rows.takes(experts, layout) == taken


@pytest.mark.parametrize(("touched", "width", "strips"), [(2, 512, 1), (8, 512, 3), (16, 512, 3), (1, 2048, 1)])
def test_units_keep_the_busiest_warp_short(touched: int, width: int, strips: int) -> None:
    assert few_rows.choose_strips(touched, 7168, width, 96) == strips
