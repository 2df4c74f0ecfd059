"""Embeddings against their definition; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.embedding import reference

triton = pytest.importorskip("kernels.embedding.triton")

pytestmark = pytest.mark.usefixtures("poisoned")


# A share of the vocabulary, more tokens than rows of the residual, and fewer.
@pytest.mark.parametrize(
    ("tokens", "width", "first", "residual_rows"), [(5, 96, 0, 5), (4, 1100, 30, 2), (1, 64, 7, 3), (0, 64, 0, 0)]
)
def test_rows_are_those_of_the_table(
    tokens: int, width: int, first: int, residual_rows: int, device: torch.device
) -> None:
    token_ids = torch.randint(0, 100, (tokens,), device=device)
    table = torch.randn(100 if first == 0 else 40, width, device=device).bfloat16()
    found, residual = triton.embed(token_ids, table, first, residual_rows)
    expected, zeros = reference.embed(token_ids, table, first, residual_rows)
    assert torch.equal(found, expected) and torch.equal(residual, zeros)
