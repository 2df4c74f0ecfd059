"""The kernel of one or two tokens' INT4 experts, against the definition; which tokens it takes."""

from dataclasses import replace

import pytest
import torch

from kernels.expert_rows import reference as expert_rows
from kernels.hopper import processors
from kernels.moe_permute.layout import NOWHERE
from kernels.w4a8_gemm import Int4FeedForward, few_tokens, reference
from tests.kernels.test_w4a8_feed_forward import random_feed_forward
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

# Hidden size and width: with fewer groups of inputs than warps that share them, with strips that do not fill a unit,
# the largest, and experts whose width ranks divide.
SHAPES = [(128, 128), (256, 384), (1152, 640), (8192, 1024), (7168, 512)]
# What tokens choose: one token with one expert; two that have one, some or all of their experts in common; no expert.
CHOICES = [
    [[2]],
    [[0], [0]],
    [[3, 1, 0], [4, 3, 2]],
    [[5, 1, 4, 0], [0, 1, 4, 5]],
    [[-1, 2, -1], [-1, -1, -1]],
    [[-1, -1]],
]
EXPERTS = 6


def draw(tokens: int, choices: int, experts: int) -> torch.Tensor:
    return torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]).cuda()


def expected_of(
    x: torch.Tensor,
    choices: torch.Tensor,
    experts: Int4FeedForward,
    pre_scale: torch.Tensor | None,
    scale: torch.Tensor,
) -> torch.Tensor:
    """[tokens, choices, hidden]; zeros for choices of no expert."""
    count = experts.down.shape[0]
    rows, layout = expert_rows.place_rows(x, choices, count, pre_scale, scale.repeat(count), 0, 0)
    outputs = reference.w4a8_feed_forward(rows, experts, layout).flatten(0, -2)
    return torch.where((choices < 0).unsqueeze(-1), 0, outputs[layout.positions.clamp(min=0)])


def check(
    experts: Int4FeedForward, choices: torch.Tensor, ctas: int | None = None, *, pre_scaled: bool = False
) -> None:
    """Twice, since the kernel counts what is stored, and leaves zeros."""
    x = torch.randn(len(choices), experts.down.shape[1], device="cuda").bfloat16()
    pre_scale = torch.rand(x.shape[1], device="cuda") + 0.5 if pre_scaled else None
    scale = torch.tensor([0.006], device="cuda")
    expected = expected_of(x, choices, experts, pre_scale, scale)
    for _ in range(2):
        rows, positions = few_tokens.feed_forward(x, choices, experts, pre_scale, scale, ctas)
        torch.cuda.synchronize()
        assert not experts.progress.any()
        assert torch.equal(positions == NOWHERE, choices < 0)
        found = torch.where((positions < 0).unsqueeze(-1), 0, rows[positions.clamp(min=0)])
        # Sums differ in their last bits, and so some values are rounded to e4m3's other neighbour.
        assert not expected.any() or relative_error(found, expected) < 2e-2
        unused = torch.ones(len(rows), dtype=torch.bool, device="cuda")
        unused[positions[positions >= 0]] = False
        assert rows[unused].isnan().all(), "nothing is written for choices of no expert"


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_each_token_passes_through_its_experts(choices: list[list[int]], hidden: int, width: int) -> None:
    check(random_feed_forward(EXPERTS, hidden, width, "cuda"), torch.tensor(choices, device="cuda"))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("hidden", [256, 7168])
def test_channels_are_scaled_before_they_are_rounded(hidden: int) -> None:
    check(random_feed_forward(9, hidden, 512, "cuda"), draw(2, 8, 9), pre_scaled=True)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("ctas", [1, 3, 60, 132])
def test_any_number_of_ctas(ctas: int) -> None:
    check(random_feed_forward(9, 1024, 512, "cuda"), draw(2, 5, 9), ctas)


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
def test_a_cta_waits_for_one_whose_multiprocessor_another_kernel_holds() -> None:
    experts, choices = random_feed_forward(5, 1024, 512, "cuda"), draw(2, 3, 5)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # Cycles: some 0.1 s on one multiprocessor, until after the launches below.
        torch.cuda._sleep(200_000_000)
    check(experts, choices, processors(torch.device("cuda")))


@pytest.mark.gpu
@on_hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("experts", "tokens", "choices"), [(1, 2, 1), (40, 2, 16), (40, 1, 32), (512, 2, 8)])
def test_any_number_of_experts_and_choices(experts: int, tokens: int, choices: int) -> None:
    check(random_feed_forward(experts, 256, 128, "cuda"), draw(tokens, choices, experts))


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("tokens", [1, 2])
def test_results_depend_on_neither_ctas_nor_strips(tokens: int) -> None:
    weights, scale = random_feed_forward(64, 7168, 512, "cuda"), torch.tensor([0.006], device="cuda")
    for _ in range(3):
        choices, x = draw(tokens, 8, 64), torch.randn(tokens, 7168, device="cuda").bfloat16()
        first, _ = few_tokens.feed_forward(x, choices, weights, None, scale)
        assert relative_error(first.unflatten(0, choices.shape), expected_of(x, choices, weights, None, scale)) < 2e-2
        for ctas, strips in ((96, 1), (124, 2), (132, 3), (132, None)):
            # Kernels are not loaded while a graph is captured.
            few_tokens.feed_forward(x, choices, weights, None, scale, ctas, strips)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed, _ = few_tokens.feed_forward(x, choices, weights, None, scale, ctas, strips)
            for _ in range(20):
                graph.replay()
                assert torch.equal(replayed, first)


@pytest.mark.gpu
@on_hopper
def test_captured_choices_may_change_between_replays() -> None:
    weights, choices, scale = (
        random_feed_forward(32, 1024, 512, "cuda"),
        draw(2, 8, 32),
        torch.tensor([0.006], device="cuda"),
    )
    x = torch.randn(2, 1024, device="cuda").bfloat16()
    few_tokens.feed_forward(x, choices, weights, None, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, positions = few_tokens.feed_forward(x, choices, weights, None, scale)
    for _ in range(20):
        choices.copy_(torch.where(torch.rand(2, 8, device="cuda") < 0.3, -1, draw(2, 8, 32)))
        x.normal_()
        graph.replay()
        found = torch.where((positions < 0).unsqueeze(-1), 0, rows[positions.clamp(min=0)])
        assert relative_error(found, expected_of(x, choices, weights, None, scale)) < 2e-2


def taken(
    monkeypatch: pytest.MonkeyPatch, tokens: int = 1, choices: int = 2, expert_bytes: int = 5_500_000, **shape: int
) -> bool:
    monkeypatch.setattr(few_tokens, "is_hopper", lambda device: True)
    monkeypatch.setattr(Int4FeedForward, "expert_bytes", expert_bytes)
    experts = random_feed_forward(4, **{"hidden": 256, "width": 128} | shape, device="cpu")
    x = torch.randn(tokens, experts.down.shape[1]).bfloat16()
    return few_tokens.takes(x, torch.zeros(tokens, choices, dtype=torch.int64), experts)


@pytest.mark.parametrize(("tokens", "expected"), [(0, False), (1, True), (2, True), (3, False)])
def test_one_or_two_tokens_take_it(tokens: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, tokens) == expected


def test_wide_layers_and_many_choices_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, hidden=8192) and not taken(monkeypatch, hidden=8320)
    assert taken(monkeypatch, width=1024) and not taken(monkeypatch, width=1152)
    assert taken(monkeypatch, 2, 16, 1_000_000) and not taken(monkeypatch, 2, 17, 1_000_000)


def test_weights_of_minus_eight_and_float32_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_tokens, "is_hopper", lambda device: True)
    x, choices = torch.randn(1, 256).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
    experts = random_feed_forward(4, 256, 128, "cpu", lowest=-8)
    assert experts.down.has_minimum and not few_tokens.takes(x, choices, experts)
    experts = replace(
        experts, gate_up=replace(experts.gate_up, has_minimum=False), down=replace(experts.down, has_minimum=False)
    )
    assert few_tokens.takes(x, choices, experts) and not few_tokens.takes(x.float(), choices, experts)


@pytest.mark.parametrize(("tokens", "expected"), [(1, True), (2, False)])
def test_what_takes_longer_than_in_tiles_does_not(tokens: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, tokens, 8, 11_000_000) == expected


@pytest.mark.parametrize(("touched", "width", "strips"), [(2, 512, 1), (8, 512, 3), (16, 512, 3), (1, 1024, 1)])
def test_units_keep_the_busiest_warp_short(touched: int, width: int, strips: int) -> None:
    assert few_tokens.choose_strips(touched, 7168, width, 96) == strips
