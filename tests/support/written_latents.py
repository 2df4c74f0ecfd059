"""Latents that the kernel which absorbs queries writes, against the definition of both."""

from types import ModuleType

import torch

from kernels.kv_copy import BLOCK_TOKENS
from kernels.kv_write import reference as kv_write
from kernels.mla_projections import reference
from tests.support.errors import relative_error


def assert_written_and_absorbed(
    module: ModuleType,
    rows: int,
    heads: int,
    widths: tuple[int, int, int],
    pool_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """module: has `write_and_absorb`; widths: a head's own and shared channels, and the latent's."""
    nope, rope, latent = widths
    projected = torch.randn(rows, heads * (nope + rope) + latent + rope, device=device).bfloat16()
    weight = torch.randn(heads, nope, latent, device=device).bfloat16()
    norm = torch.randn(latent, device=device).bfloat16()
    rotations = torch.randn(rows, rope // 2, dtype=torch.complex64, device=device)
    slots = torch.randperm(2 * BLOCK_TOKENS, device=device)[:rows]
    pool = torch.zeros(2, BLOCK_TOKENS, latent + rope, dtype=pool_dtype, device=device)
    expected_pool, rest = pool.clone(), (norm, 1e-6, rotations, slots)
    query = kv_write.norm_and_write(projected.clone(), None, *rest, expected_pool, 0.5).reshape(rows, heads, -1)
    expected = reference.absorb_query(query.float(), weight.float(), rotations)
    queries, latents = projected.split([heads * (nope + rope), latent + rope], dim=1)
    found = module.write_and_absorb(queries.view(rows, heads, -1), latents, weight, *rest, pool, 0.5)
    assert relative_error(found, expected) < 5e-3
    assert relative_error(pool.float(), expected_pool.float()) < 5e-3
