"""Experts' products in bfloat16 for few rows, against their definition; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.grouped_gemm import few_rows, reference
from kernels.moe_gate import NO_EXPERT
from kernels.moe_permute import NOWHERE
from kernels.swiglu import reference as swiglu_reference
from kernels.swiglu import triton as triton_swiglu
from tests.support.errors import relative_error
from tests.support.listed_rows import list_rows

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.usefixtures("poisoned")
TILING = few_rows.Tiling(rows=16, outputs=32, inputs=32, stages=2, warps=4)


def expected(x: torch.Tensor, weights: torch.Tensor, counts: list[int], gated: bool) -> torch.Tensor:
    parts = zip(x.float().split(counts), weights.float(), strict=True)
    products = torch.cat([rows @ matrix.t() for rows, matrix in parts])
    return swiglu_reference.swiglu(products) if gated else products


# Rows of each group: some have none, some need several tiles; widths do not fill a tile.
@pytest.mark.parametrize("counts", [[0, 3, 0, 17, 1], [40, 0, 0, 0, 0], [1], [0, 0, 2]], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_are_multiplied_by_their_groups_matrix(counts: list[int], gated: bool, device: torch.device) -> None:
    x = torch.randn(sum(counts), 72, device=device).bfloat16()
    weights = torch.randn(len(counts), 2 * 24, 72, device=device).bfloat16()
    ends = torch.tensor(counts, device=device).cumsum(0).int()
    found = few_rows.grouped_gemm(x, weights, ends, gated=gated, tiling=TILING)
    assert relative_error(found.float(), expected(x, weights, counts, gated)) < 0.01


def test_rows_after_the_last_group_are_left_alone(device: torch.device) -> None:
    x, weights = torch.randn(9, 32, device=device).bfloat16(), torch.randn(2, 16, 32, device=device).bfloat16()
    ends = torch.tensor([2, 5], dtype=torch.int32, device=device)
    found = few_rows.grouped_gemm(x, weights, ends, tiling=TILING)
    assert relative_error(found[:5].float(), expected(x[:5], weights, [2, 3], False)) < 0.01


# Shared experts have more rows than a tile; the last two tokens have no expert.
@pytest.mark.parametrize(("tokens", "shared"), [(3, 0), (21, 2)])
def test_listed_rows_are_read_where_their_tokens_are(tokens: int, shared: int, device: torch.device) -> None:
    experts, hidden, width = 7 + shared, 48, 40
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    gate_up = torch.randn(experts, 2 * width, hidden, device=device).bfloat16()
    down = torch.randn(experts, hidden, width, device=device).bfloat16() / hidden
    routed = torch.rand(tokens, 7, device=device).argsort(dim=1)[:, :2]
    chosen = torch.cat([routed, torch.arange(7, experts, device=device).expand(tokens, shared)], dim=1)
    chosen[-2:] = NO_EXPERT
    listed = list_rows(chosen, experts, shared)
    found = few_rows.listed_feed_forward(x, listed, gate_up, down)
    for token, place in (listed.positions != NOWHERE).nonzero().tolist():
        expert = chosen[token, place]
        inner = swiglu_reference.swiglu(x[token : token + 1].float() @ gate_up[expert].float().t())
        assert relative_error(found[listed.positions[token, place]].float(), inner[0] @ down[expert].float().t()) < 0.02


def test_no_rows_give_none(device: torch.device) -> None:
    x, weights = torch.empty(0, 32, device=device).bfloat16(), torch.randn(2, 16, 32, device=device).bfloat16()
    found = few_rows.grouped_gemm(x, weights, torch.zeros(2, dtype=torch.int32, device=device), gated=True)
    assert found.shape == (0, 8)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1500), (0, 16)])
def test_the_gate_is_the_definitions(rows: int, width: int, device: torch.device) -> None:
    gate_up = torch.randn(rows, 2 * width, device=device).bfloat16()
    found = triton_swiglu.swiglu(gate_up)
    assert found.shape == (rows, width)
    assert not rows or relative_error(found.float(), swiglu_reference.swiglu(gate_up.float())) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
# Moonlight's and GLM-4.7-Flash's experts, with one token and with as many as this kernel takes.
@pytest.mark.parametrize(("groups", "inputs", "width"), [(66, 2048, 1408), (65, 2048, 1536), (65, 1536, 2048)])
@pytest.mark.parametrize("tokens", [1, 16, 64, 256])
def test_published_experts_are_multiplied(groups: int, inputs: int, width: int, tokens: int, gated: bool) -> None:
    chosen = torch.rand(tokens, groups, device="cuda").argsort(dim=1)[:, :8]
    counts = torch.bincount(chosen.flatten(), minlength=groups)
    x = torch.randn(tokens * 8, inputs, device="cuda").bfloat16()
    weights = torch.randn(groups, 2 * width if gated else width, inputs, device="cuda").bfloat16() / 32
    ends = counts.cumsum(0).int()
    product = reference.grouped_gemm(x, weights, ends).float()
    definition = swiglu_reference.swiglu(product) if gated else product
    assert relative_error(few_rows.grouped_gemm(x, weights, ends, gated=gated).float(), definition) < 0.01
