"""Experts' products in bfloat16 for many rows on Hopper, against their definition."""

import pytest
import torch

from kernels.grouped_gemm import many_rows
from tests.kernels.test_grouped_few_rows import expected
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

pytestmark = [pytest.mark.gpu, on_hopper, pytest.mark.usefixtures("poisoned")]


# Groups without rows, with more tiles than are taken together, and with tiles of each number of rows.
@pytest.mark.parametrize(
    "counts", [[0, 3, 0, 617, 1, 64, 256, 190], [2500, 0, 129], [1], [0, 128, 0], [*range(15, 256, 16)]], ids=str
)
@pytest.mark.parametrize("gated", [False, True])
# GLM-4.7-Flash's and Moonlight's experts, and widths that fill neither a tile nor a copy.
@pytest.mark.parametrize(("outputs", "inputs"), [(3072, 2048), (2816, 2048), (2048, 1536), (2048, 1408), (144, 136)])
def test_rows_are_multiplied_by_their_groups_matrix(counts: list[int], gated: bool, outputs: int, inputs: int) -> None:
    x = torch.randn(sum(counts) + 70, inputs, device="cuda").bfloat16()
    weights = torch.randn(len(counts), outputs, inputs, device="cuda").bfloat16() / inputs**0.5
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    # The last rows belong to no group.
    used = sum(counts)
    product = expected(x[:used], weights, counts, gated)
    for tile_rows in many_rows.TILE_ROWS:
        found = many_rows.grouped_gemm(x, weights, ends, gated=gated, tile_rows=tile_rows)[:used]
        assert relative_error(found.float(), product) < 5e-3


def test_a_product_is_the_same_each_time() -> None:
    x, weights = torch.randn(3000, 512, device="cuda").bfloat16(), torch.randn(5, 768, 512, device="cuda").bfloat16()
    ends = torch.tensor([700, 700, 1900, 1903, 3000], device="cuda").int()
    first = many_rows.grouped_gemm(x, weights, ends, gated=True)
    assert all(torch.equal(many_rows.grouped_gemm(x, weights, ends, gated=True), first) for _ in range(200))
