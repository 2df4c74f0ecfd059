"""The choice of the highest scores: its definition, and Triton's kernel, interpreted where there is no GPU."""

from collections.abc import Callable, Sequence
from importlib import import_module

import pytest
import torch

from kernels.top_tokens import NO_TOKEN, clusters, reference, top_tokens
from kernels.top_tokens import triton as ours
from tests.support.combinations import crossed

Chooser = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Where programs are interpreted, have them read so few scores at a time that few scores take several turns."""
    if device.type == "cpu":
        monkeypatch.setattr(ours, "TILE", 64)


def chosen(scores: list[float], count: int) -> list[int]:
    """In plain Python: by score, then by position."""
    ranked = sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:count]
    return sorted(ranked) + [NO_TOKEN] * (count - len(ranked))


def assert_chosen(scores: torch.Tensor, seen: list[int], count: int, found: torch.Tensor) -> None:
    expected = [chosen(row[:size].tolist(), count) for row, size in zip(scores, seen, strict=True)]
    assert found.dtype == torch.int32 and found.tolist() == expected


def drawn(kind: str, queries: int, width: int) -> torch.Tensor:
    if kind == "equal":
        return torch.full((queries, width), -0.25)
    if kind == "few values":
        return torch.randint(-2, 3, (queries, width)).float() / 4
    if kind == "zeros":
        # As where ReLU leaves nothing; both zeros count the same.
        signs = torch.randint(0, 2, (queries, width)).float() * 2 - 1
        return torch.where(torch.rand(queries, width) < 0.8, 0.0 * signs, torch.randn(queries, width))
    return torch.randn(queries, width) * (1e30 if kind == "large" else 1.0)


@crossed(
    chooser=[reference.top_tokens, ours.top_tokens],
    kind=["random", "equal", "few values", "zeros", "large"],
    count=[1, 7, 40, 100],
)
def test_the_highest_scores_are_chosen_and_ties_by_position(
    chooser: Chooser, kind: str, count: int, device: torch.device
) -> None:
    seen = [1, 6, 7, 8, 39, 40, 41, 64, 65, 200]
    scores = drawn(kind, len(seen), 200)
    # What a query does not see is never read.
    for row, size in zip(scores, seen, strict=True):
        row[size:] = float("nan")
    found = chooser(scores.to(device), torch.tensor(seen, dtype=torch.int32, device=device), count)
    assert_chosen(scores, seen, count, found.cpu())


@pytest.mark.parametrize("chooser", [reference.top_tokens, ours.top_tokens], ids=["reference", "triton"])
def test_the_lowest_bytes_of_scores_decide_between_neighbours(chooser: Chooser, device: torch.device) -> None:
    bits = torch.randperm(300)[:150].int() + 0x3F800000
    scores = torch.stack((bits.view(torch.float32), -bits.view(torch.float32)))
    found = chooser(scores.to(device), torch.full((2,), 150, dtype=torch.int32, device=device), 20)
    assert_chosen(scores, [150, 150], 20, found.cpu())


def test_no_queries_have_no_tokens(device: torch.device) -> None:
    assert top_tokens(torch.empty(0, 64, device=device), torch.empty(0, dtype=torch.int32, device=device), 5).shape == (
        0,
        5,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 2049, 8192, 16384, 163840])
@pytest.mark.parametrize("kind", ["random", "few values", "zeros", "equal"])
@pytest.mark.parametrize("module", ["triton", "clusters", "short_rows"])
def test_two_thousand_are_chosen_of_long_contexts(kind: str, width: int, module: str, device: torch.device) -> None:
    form = import_module(f"kernels.top_tokens.{module}")
    if module == "short_rows" and width > form.THREADS * form.HELD[-1]:
        pytest.skip("more than a CTA has room for")
    chooser: Chooser = form.top_tokens
    seen = torch.tensor([width, width - 1, 2048, 2047, 1], dtype=torch.int32, device=device)
    scores = drawn(kind, len(seen), width).to(device)
    assert torch.equal(chooser(scores, seen, 2048), reference.top_tokens(scores, seen, 2048))


@pytest.mark.parametrize(
    ("queries", "width", "name", "ctas"),
    [
        (8, 33_024, "choose", 4), (64, 33_024, "choose", 2), (8, 131_328, "choose", 8), (300, 24_000, "choose", 1),
        (300, 33_024, "choose", 1), (24, 131_328, "choose_long", 4), (32, 131_328, "choose_long", 3),
        (64, 70_000, "choose_long", 2), (300, 131_328, "choose", 4), (9, 270_000, "choose", 8),
    ],
)  # fmt: skip
def test_clusters_hold_most_of_a_querys_scores(queries: int, width: int, name: str, ctas: int) -> None:
    assert clusters._form(queries, width, 132) == (name, ctas)


def assert_clusters_choose(counts: Sequence[int], kind: str, queries: int, width: int, device: torch.device) -> None:
    """Clusters choose what the reference chooses of scores of each query's 1 to `width` tokens."""
    chooser: Chooser = import_module("kernels.top_tokens.clusters").top_tokens
    scores, seen = drawn(kind, queries, width).to(device), torch.randint(1, width + 1, (queries,), device=device).int()
    for count in counts:
        assert torch.equal(chooser(scores, seen, count), reference.top_tokens(scores, seen, count))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [9, 32, 70])
@pytest.mark.parametrize("kind", ["random", "few values", "zeros"])
def test_long_rows_of_many_queries_are_held(queries: int, kind: str, device: torch.device) -> None:
    assert_clusters_choose((2048,), kind, queries, 131_000, device)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8193, 33_024, 131_328])
def test_rows_of_any_length_have_room_for_long_ones(width: int, device: torch.device) -> None:
    seen = torch.tensor([1, 2047, 2048, 2049, 3500, 8191, 8192, 8193, width - 1, width] * 7, dtype=torch.int32)
    scores = torch.randn(len(seen), width)
    for row, tokens in zip(scores, seen, strict=True):
        row[tokens:] = float("nan")
    given = scores.to(device), seen.to(device), 2048
    found = import_module("kernels.top_tokens.clusters").top_tokens(*given)
    assert torch.equal(found, reference.top_tokens(*given))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 70, 300])
@pytest.mark.parametrize("kind", ["random", "zeros", "large"])
def test_clusters_choose_any_number_of_any_row(queries: int, kind: str, device: torch.device) -> None:
    assert_clusters_choose((1, 40, 512), kind, queries, 5003, device)
