from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kernels.grouped_gemm import grouped_gemm, reference
from kernels.moe_permute import ExpertOutputs, combine, expand
from kernels.swiglu import swiglu
from tests.support.errors import assert_close


@pytest.mark.parametrize("counts", [[3, 0, 1, 40], [0, 0, 0, 7], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_each_group_meets_its_own_matrix(counts: list[int]) -> None:
    x, weights = torch.randn(sum(counts), 24), torch.randn(4, 10, 24)
    expected = torch.cat([part @ weight.t() for part, weight in zip(x.split(counts), weights, strict=True)])
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    assert torch.allclose(grouped_gemm(x, weights, ends), expected, atol=1e-5)


@pytest.mark.parametrize("tokens", [0, 1, 2, 50])
def test_expert_rows_are_sorted_and_hold_their_tokens(tokens: int) -> None:
    x, experts = torch.randn(tokens, 6), torch.randint(0, 5, (tokens, 3))
    expanded = expand(x, experts, 5)
    assert expanded.ends.tolist() == [int((experts <= expert).sum()) for expert in range(5)]
    assert torch.equal(expanded.rows[expanded.positions], x.unsqueeze(1).expand(-1, 3, -1))
    experts_of_rows = torch.empty(tokens * 3, dtype=torch.int64)
    experts_of_rows[expanded.positions.flatten()] = experts.flatten()
    assert experts_of_rows.tolist() == sorted(experts.flatten().tolist())


@pytest.mark.parametrize("tokens", [0, 1, 2, 50])
def test_combining_sums_a_tokens_experts_by_weight(tokens: int) -> None:
    x, experts = torch.randn(tokens, 6), torch.randint(0, 5, (tokens, 3))
    weights, factors = torch.randn(tokens, 3), torch.randn(5)
    expanded = expand(x, experts, 5)
    rows = torch.empty_like(expanded.rows)
    rows[expanded.positions] = x.unsqueeze(1) * factors[experts].unsqueeze(2)
    expected = x * (weights * factors[experts]).sum(1, keepdim=True)
    outputs, shared = ExpertOutputs(rows, expanded.positions, weights), torch.randn(tokens, 6)
    assert torch.allclose(combine(outputs), expected, atol=1e-5)
    expected += shared
    assert torch.allclose(combine(replace(outputs, shared=shared)), expected, atol=1e-5)
    # Sums may take the place of the shared outputs.
    combine(replace(outputs, shared=shared), out=shared)
    assert torch.allclose(shared, expected, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_swiglu_gates_the_second_half_by_the_first(rows: int) -> None:
    x = torch.randn(rows, 20)
    assert torch.allclose(swiglu(x), functional.silu(x[:, :10]) * x[:, 10:])


def test_a_product_of_all_groups_keeps_each_rows_own() -> None:
    x, weights = torch.randn(10, 16), torch.randn(4, 24, 16)
    ends = torch.tensor([3, 3, 7, 10], dtype=torch.int32)
    assert_close(reference.all_groups_gemm(x, weights, ends), grouped_gemm(x, weights, ends))
