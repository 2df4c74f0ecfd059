"""Queries and keys of the lightning indexer, and the pool that holds its keys.

DeepSeek-V3.2 (DeepSeek-AI, 2025), section 2.1: heads with one key in common score the tokens before a query. A key is
normalized by mean and variance (LayerNorm), and its first numbers are rotated by the token's position; queries are
rotated alike.

A pool of keys that are not quantized has their dtype. A quantized pool has bytes: in each block 64 keys in e4m3, then
their 64 scales in float32, which are powers of two (ue8m0). There keys and queries are multiplied by a Hadamard matrix
first: that leaves their products as they are, and spreads what is large in one number over all of them.
"""

from types import ModuleType

import torch

from kernels.index_keys import reference
from kernels.index_keys.queries import IndexQueries
from kernels.kv_copy import BLOCK_TOKENS

__all__ = ["IndexQueries", "copy_in", "copy_out", "make_queries", "pool_shape", "read_keys", "write_keys"]

SCALE_BYTES = reference.SCALE_BYTES
# LayerNorm's epsilon in the published models, whatever config.json says of other norms.
EPSILON = 1e-6
# A warp adds them up, a lane each.
MOST_SHARES = 32


def pool_shape(width: int, dtype: torch.dtype) -> tuple[tuple[int, int], torch.dtype]:
    """The shape and dtype of a block of keys whose numbers are kept in `dtype`."""
    if dtype == torch.float8_e4m3fn:
        return (BLOCK_TOKENS, width + SCALE_BYTES), torch.uint8
    return (BLOCK_TOKENS, width), dtype


def write_keys(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    *,
    interleaved: bool,
) -> None:
    """Normalize and rotate the tokens' keys, and write them to their slots.

    projected: [tokens, width], a power of two; weight, bias: [width] float32; rotations: [tokens, pairs] complex64, for
    the first 2 * pairs numbers of a key: those next to each other are a pair if `interleaved`, else those half of them
    apart; slots: [tokens] int64, distinct; pool: [blocks, 64, ...], one layer's, see `pool_shape`. All contiguous, but
    that the rows of `projected` may be parts of wider ones. No tokens write nothing.
    """
    tokens, width = projected.shape
    assert slots.shape == (tokens,) and rotations.shape[0] == tokens and 2 * rotations.shape[1] <= width
    assert weight.shape == bias.shape == (width,) and projected.stride(1) == 1 and pool.is_contiguous()
    assert rotations.is_contiguous() and width & (width - 1) == 0
    assert pool.shape[1:] == pool_shape(width, _kept(pool))[0]
    backend = _backend(projected, rotations, pool.dtype == torch.uint8)
    backend.write_keys(projected, weight, bias, EPSILON, rotations, slots, pool, interleaved)


def make_queries(
    projected: torch.Tensor,
    weights: torch.Tensor,
    rotations: torch.Tensor,
    pool: torch.Tensor,
    *,
    factor: float,
    interleaved: bool,
) -> IndexQueries:
    """Rotate the tokens' queries, and bring them into the form of the pool's keys.

    projected: [tokens, heads, width]; weights: [shares, tokens, heads] float32, at most MOST_SHARES: a head's score
    counts factor times the sum over the shares; rotations, interleaved, pool: as of `write_keys`.
    """
    assert weights.shape[1:] == projected.shape[:2] and weights.dtype == torch.float32
    assert 1 <= weights.shape[0] <= MOST_SHARES
    assert projected.is_contiguous() and weights.is_contiguous() and rotations.is_contiguous()
    quantized = pool.dtype == torch.uint8
    backend = _backend(projected, rotations, quantized)
    queries: IndexQueries = backend.make_queries(projected, weights, factor, rotations, quantized, interleaved)
    return queries


def read_keys(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The keys at these slots: [tokens, width], float32 or the pool's dtype. slots: [tokens] int64."""
    return reference.read_keys(pool, slots)


def copy_out(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What the pool holds of these slots: [tokens, bytes of a key] uint8. slots: [tokens] int64."""
    return reference.copy_out(pool, slots)


def copy_in(copied: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> None:
    """Put what `copy_out` returned, perhaps of another pool, at these slots; the last wins where slots are equal."""
    reference.copy_in(copied, pool, slots)


def _kept(pool: torch.Tensor) -> torch.dtype:
    return torch.float8_e4m3fn if pool.dtype == torch.uint8 else pool.dtype


def _backend(projected: torch.Tensor, rotations: torch.Tensor, quantized: bool) -> ModuleType:
    if not projected.is_cuda:
        return reference
    # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
    from kernels.index_keys import rows, triton

    return rows if rows.takes(projected, rotations, quantized) else triton
