"""Absorbed queries of a few rows, against their definition; without a GPU in Triton's interpreter."""

import pytest
import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.kv_write import reference as kv_write
from kernels.mla_projections import reference
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

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


def assert_written_and_absorbed(
    rows: int, heads: int, latent: int, pool_dtype: torch.dtype, device: torch.device
) -> None:
    nope, rope = 48, 16
    projected = torch.randn(rows, heads * (nope + rope) + latent + rope, device=device).bfloat16()
    weight, norm = (
        torch.randn(heads, nope, latent, device=device).bfloat16(),
        torch.randn(latent, device=device).bfloat16(),
    )
    rotations = torch.randn(rows, rope // 2, dtype=torch.complex64, device=device)
    slots = torch.randperm(2 * BLOCK_TOKENS, device=device)[:rows]
    pool = torch.zeros(2, BLOCK_TOKENS, latent + rope, dtype=pool_dtype, device=device)
    expected_pool, rest = pool.clone(), (norm, 1e-6, rotations, slots)
    query = kv_write.norm_and_write(projected.clone(), None, *rest, expected_pool, 0.5).reshape(rows, heads, -1)
    expected = reference.absorb_query(query.float(), weight.float(), rotations)
    queries, latents = projected.split([heads * (nope + rope), latent + rope], dim=1)
    found = few_rows.write_and_absorb(queries.view(rows, heads, -1), latents, weight, *rest, pool, 0.5)
    assert relative_error(found, expected) < 5e-3
    assert relative_error(pool.float(), expected_pool.float()) < 5e-3


# As many rows as programs that write them, and more.
@pytest.mark.parametrize(("rows", "latent"), [(1, 300), (3, 512)])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_latents_are_written_by_the_kernel_that_absorbs(
    rows: int, latent: int, pool_dtype: torch.dtype, device: torch.device
) -> None:
    assert_written_and_absorbed(rows, 2, latent, pool_dtype, device)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("rows", [1, 2, 4])
# Moonlight's heads and GLM-4.7-Flash's.
@pytest.mark.parametrize(("heads", "nope"), [(16, 128), (20, 192)])
def test_published_heads_absorb_few_queries(rows: int, heads: int, nope: int) -> None:
    assert_absorbed(rows, heads, nope, 64, 512, torch.device("cuda"))
