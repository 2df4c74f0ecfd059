"""Absorbed queries of a few rows, against their definition; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.mla_projections import reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper
from tests.support.written_latents import assert_written_and_absorbed

few_rows = pytest.importorskip("kernels.mla_projections.few_rows")

pytestmark = pytest.mark.usefixtures("poisoned")


def assert_absorbed(rows: int, heads: int, nope: int, rope: int, latent: int, device: torch.device) -> None:
    # Slices of wider matrices: neither queries nor a head's weights are contiguous.
    query = torch.randn(rows, heads + 1, nope + rope, device=device).bfloat16()[:, 1:]
    weight = torch.randn(heads, nope + 8, latent, device=device).bfloat16()[:, :nope]
    rotations = torch.randn(rows, rope // 2, dtype=torch.complex64, device=device)
    found = few_rows.absorb_query(query, weight, rotations)
    expected = reference.absorb_query(query.float(), weight.float(), rotations)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    assert relative_error(found[:, :, :latent], expected[:, :, :latent]) < 5e-3
    assert relative_error(found[:, :, latent:], expected[:, :, latent:]) < 5e-3


@pytest.mark.parametrize(("rows", "nope", "rope", "latent"), [(1, 48, 12, 512), (3, 200, 16, 70)])
def test_few_queries_are_absorbed_as_defined(
    rows: int, nope: int, rope: int, latent: int, device: torch.device
) -> None:
    assert_absorbed(rows, 2, nope, rope, latent, device)


# As many rows as programs that write them, and more.
@pytest.mark.parametrize(("rows", "latent"), [(1, 300), (3, 512)])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_latents_are_written_by_the_kernel_that_absorbs(
    rows: int, latent: int, pool_dtype: torch.dtype, device: torch.device
) -> None:
    assert_written_and_absorbed(few_rows, rows, 2, (48, 16, latent), pool_dtype, device)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 2, 4])
# Moonlight's heads and GLM-4.7-Flash's.
@pytest.mark.parametrize(("heads", "nope"), [(16, 128), (20, 192)])
def test_published_heads_absorb_few_queries(rows: int, heads: int, nope: int) -> None:
    assert_absorbed(rows, heads, nope, 64, 512, torch.device("cuda"))
