"""The step between attention's input projection and its queries' second projection: it also fills the pool.

One pass over the projection's output normalizes (and quantizes) each token's query, normalizes its latent, rotates its
key, and writes latent and key to the token's slot.
"""

from types import ModuleType

import torch

from kernels.act_quant import GROUP, Quantized
from kernels.kv_copy import BLOCK_TOKENS, COMPRESSED
from kernels.kv_write import reference


def norm_and_write(
    projected: torch.Tensor,
    query_weight: torch.Tensor | None,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor:
    """Write the tokens' latents to the pool, and return their normalized queries, a new [tokens, query_width].

    projected: [tokens, query_width + latent_width + rope], last dimension contiguous: query, latent, key. The latent is
    normalized and the key rotated in place. query_weight: [query_width], or None if queries are not normalized: then
    the first part itself is returned; latent_weight: [latent_width]; rotations: [tokens, rope / 2] complex64
    contiguous; slots: [tokens] int64, distinct; pool: [blocks, 64, latent_width + rope] contiguous, one layer's, of the
    same dtype, or e4m3, where a latent is `scale` times the stored value. No tokens write nothing.
    """
    _check(projected, query_weight, latent_weight, rotations, slots, pool)
    query: torch.Tensor = _backend(projected).norm_and_write(
        projected, query_weight, latent_weight, epsilon, rotations, slots, pool, scale
    )
    return query


def norm_quantize_and_write(
    projected: torch.Tensor,
    query_weight: torch.Tensor,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float = 1.0,
    *,
    powers: bool = False,
) -> Quantized:
    """`norm_and_write` that quantizes the queries; query_width is a multiple of 128. powers: whether scales are powers
    of two.
    """
    _check(projected, query_weight, latent_weight, rotations, slots, pool)
    assert query_weight.shape[0] % GROUP == 0
    query: Quantized = _backend(projected).norm_quantize_and_write(
        projected, query_weight, latent_weight, epsilon, rotations, slots, pool, scale, powers
    )
    return query


def _check(
    projected: torch.Tensor,
    query_weight: torch.Tensor | None,
    latent_weight: torch.Tensor,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
) -> None:
    tokens, width = projected.shape
    assert projected.stride(1) == 1 and pool.is_contiguous() and pool.dtype in (projected.dtype, COMPRESSED)
    assert pool.shape[1] == BLOCK_TOKENS and slots.shape == (tokens,) and slots.dtype == torch.int64
    assert rotations.shape == (tokens, (pool.shape[2] - latent_weight.shape[0]) // 2)
    assert query_weight is None or query_weight.shape[0] + pool.shape[2] == width


def _backend(x: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        from kernels.kv_write import triton

        return triton
    return reference
