import pytest
import torch

from kernels.mla_prefill import mla_prefill, reference


def expected(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """In float64, all scores at once."""
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(key.shape[0] - query.shape[0] + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(2), value.double())


@pytest.mark.parametrize(("queries", "cached"), [(1, 0), (2, 0), (1, 77), (255, 0), (257, 0), (300, 100), (513, 1)])
def test_each_query_sees_the_prefix_and_what_came_before_it(queries: int, cached: int) -> None:
    query, key = torch.randn(queries, 3, 24), torch.randn(queries + cached, 3, 24)
    value = torch.randn(queries + cached, 3, 16)
    exact = expected(query, key, value, 0.3)
    assert (mla_prefill(query, key, value, scale=0.3).double() - exact).norm() / exact.norm() < 1e-6


def test_values_may_be_a_part_of_a_wider_tensor() -> None:
    query, key, wide = torch.randn(70, 2, 24), torch.randn(70, 2, 24), torch.randn(70, 2, 50)
    found = mla_prefill(query, key, wide[:, :, 30:], scale=0.3)
    assert torch.equal(found, mla_prefill(query, key, wide[:, :, 30:].contiguous(), scale=0.3))


def test_narrow_tiles_of_long_contexts_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(90, 2, 24), torch.randn(100, 2, 24), torch.randn(100, 2, 16)
    wide = mla_prefill(query, key, value, scale=0.3)
    monkeypatch.setattr(reference, "TILE_SCORES", 2 * 100 * 7)
    assert torch.allclose(mla_prefill(query, key, value, scale=0.3), wide, atol=1e-6)


def test_no_queries_give_none() -> None:
    found = mla_prefill(torch.empty(0, 2, 24), torch.randn(5, 2, 24), torch.randn(5, 2, 16), scale=1.0)
    assert found.shape == (0, 2, 16)
