import pytest
import torch

from kernels.sparse_prefill import triton_choice, triton_line_masses
from kernels.sparse_prefill.line_masses import LineMasses, line_masses
from kernels.sparse_prefill.selection import MASS_UNITS, Selection, choose
from tests.support.combinations import crossed

SCALE = 0.3
# Queries, keys, heads: tiles of 64 queries of two heads by 128 keys, runs of 1,024 keys, all of them ragged or not.
SHAPES = [(1, 1, 3), (1, 128, 2), (1, 130, 1), (63, 63, 1), (64, 64, 2), (17, 311, 3), (64, 500, 3), (50, 1100, 1)]


def compare(found: LineMasses, expected: LineMasses, bound: float) -> None:
    for name in ("columns", "slashes", "parts"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.shape == other.shape and torch.allclose(one, other, rtol=bound, atol=bound), name


def lines(selected: Selection) -> torch.Tensor:
    return torch.cat([selected.columns, selected.slashes], dim=1)


@crossed(queries__keys__heads=SHAPES, shared=[True, False])
def test_triton_sums_what_the_definition_does(
    queries: int, keys: int, heads: int, shared: bool, device: torch.device, poisoned: None
) -> None:
    query = 3 * torch.randn(queries, heads, 72, device=device)
    key = torch.randn(keys, 1 if shared else heads, 72, device=device)
    expected = line_masses(query, key, SCALE)
    compare(triton_line_masses.line_masses(query, key, SCALE), expected, 1e-5)


@crossed(queries__keys__heads=SHAPES, shared__width=[(True, 72), (False, 64)])
def test_triton_multiplies_stored_latents_in_e4m3(
    queries: int, keys: int, heads: int, shared: bool, width: int, device: torch.device, poisoned: None
) -> None:
    query = 3 * torch.randn(queries, heads, width, device=device).bfloat16()
    key = torch.randn(keys, 1 if shared else heads, width, device=device).to(torch.float8_e4m3fn)
    expected = line_masses(query, key, SCALE)
    # The tensor cores sum with fewer bits. A number between two of e4m3's may be rounded to the other one.
    compare(triton_line_masses.line_masses(query, key, SCALE), expected, 2e-2 if query.is_cuda else 1e-3)


def test_each_heads_query_is_rounded_by_its_own_size() -> None:
    """Also a query of zeros, and large next to small ones: masses differ little from those of exact queries."""
    query, key = torch.randn(20, 3, 64), torch.randn(300, 1, 64).to(torch.float8_e4m3fn)
    query[3, 1], query[4] = 0, query[4] * 1e-6
    found, exact = line_masses(query, key, SCALE), line_masses(query, key.float(), SCALE)
    assert (found.parts - exact.parts).norm() < 0.05 * exact.parts.norm()
    assert (found.columns - exact.columns).norm() < 0.1 * exact.columns.norm()


def test_tritons_sums_choose_other_lines_at_the_bound_alone(device: torch.device) -> None:
    """Both sum the same weights in another order: a head's last line may differ if it is as good as the next."""
    query, key = 3 * torch.randn(64, 2, 72, device=device), torch.randn(900, 1, 72, device=device)
    expected, found = line_masses(query, key, SCALE), triton_line_masses.line_masses(query, key, SCALE)
    first, wanted = 900 - 64, 64 * 7 * MASS_UNITS // 10
    fewer, more = (lines(choose(expected, first, wanted + slack)) for slack in (-wanted // 10000, wanted // 10000))
    chosen = lines(choose(found, first, wanted))
    assert (chosen | ~fewer).all() and (more | ~chosen).all()
    assert not chosen.all() and chosen.sum() > 6


@crossed(queries__keys__heads=SHAPES, recall=[0.0, 0.3, 0.9, 0.999, 1.1])
def test_triton_chooses_what_the_definition_does(
    queries: int, keys: int, heads: int, recall: float, device: torch.device, poisoned: None
) -> None:
    query, key = 5 * torch.randn(queries, heads, 72, device=device), torch.randn(keys, 1, 72, device=device)
    masses, first, wanted = line_masses(query, key, SCALE), keys - queries, int(queries * recall * MASS_UNITS)
    expected = choose(masses, first, wanted)
    found = Selection(*triton_choice.choose(masses, first, wanted, MASS_UNITS))
    assert torch.equal(lines(found), lines(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("heads", "width", "shared"), [(128, 576, True), (16, 192, False)])
def test_triton_sums_at_deepseeks_shapes(
    heads: int, width: int, shared: bool, dtype: torch.dtype, device: torch.device, poisoned: None
) -> None:
    query = torch.randn(64, heads, width, device=device, dtype=torch.bfloat16)
    key = torch.randn(5003, 1 if shared else heads, width, device=device).to(dtype)
    exact = (query, key) if dtype == torch.float8_e4m3fn else (query.float(), key.float())
    expected = line_masses(*exact, 0.1)
    found = triton_line_masses.line_masses(query, key, 0.1)
    # Numbers of e4m3 as above.
    compare(found, expected, 2e-2 if dtype == torch.float8_e4m3fn else 1e-2)
    # All ranks of a group choose alike.
    again = triton_line_masses.line_masses(query, key, 0.1)
    assert all(torch.equal(getattr(found, name), getattr(again, name)) for name in ("columns", "slashes", "parts"))
