import pytest
import torch

from kernels.sparse_prefill import triton_line_masses
from kernels.sparse_prefill.line_masses import LineMasses, line_masses
from kernels.sparse_prefill.selection import Selection, choose

SCALE = 0.3
# Queries, keys, heads: tiles of 64 queries of two heads by 128 keys, runs of 1,024 keys, all of them ragged or not.
SHAPES = [(1, 1, 3), (1, 128, 2), (1, 130, 1), (63, 63, 1), (64, 64, 2), (17, 311, 3), (64, 500, 3), (50, 1100, 1)]
shapes = pytest.mark.parametrize(("queries", "keys", "heads"), SHAPES)


def compare(found: LineMasses, expected: LineMasses, bound: float) -> None:
    for name in ("columns", "slashes", "parts"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.shape == other.shape and torch.allclose(one, other, rtol=bound, atol=bound), name


def lines(selected: Selection) -> torch.Tensor:
    return torch.cat([selected.columns, selected.slashes], dim=1)


@shapes
@pytest.mark.parametrize("shared", [True, False])
def test_triton_sums_what_the_definition_does(
    queries: int, keys: int, heads: int, shared: bool, device: torch.device, poisoned: None
) -> None:
    query = 3 * torch.randn(queries, heads, 72, device=device)
    key = torch.randn(keys, 1 if shared else heads, 72, device=device)
    expected = line_masses(query, key, SCALE)
    compare(triton_line_masses.line_masses(query, key, SCALE), expected, 1e-5)


def test_the_choice_from_tritons_sums_differs_at_most_where_sums_are_at_the_bound(device: torch.device) -> None:
    """Both sum the same weights in another order: a head's last line may differ if it is as good as the next."""
    query, key = 3 * torch.randn(64, 2, 72, device=device), torch.randn(900, 1, 72, device=device)
    expected, found = line_masses(query, key, SCALE), triton_line_masses.line_masses(query, key, SCALE)
    first, enough = 900 - 64, 64 * 0.7
    fewer, more = (lines(choose(expected, first, enough * (1 + slack))) for slack in (-1e-4, 1e-4))
    chosen = lines(choose(found, first, enough))
    assert (chosen | ~fewer).all() and (more | ~chosen).all()
    assert not chosen.all() and chosen.sum() > 6
    assert torch.equal(chosen, lines(choose(found, first, enough)))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "width", "shared"), [(128, 576, True), (16, 192, False)])
def test_triton_sums_at_deepseeks_shapes(
    heads: int, width: int, shared: bool, device: torch.device, poisoned: None
) -> None:
    query = torch.randn(64, heads, width, device=device, dtype=torch.bfloat16)
    key = torch.randn(5003, 1 if shared else heads, width, device=device, dtype=torch.bfloat16)
    expected = line_masses(query.float(), key.float(), 0.1)
    compare(triton_line_masses.line_masses(query, key, 0.1), expected, 1e-2)
