"""The products around absorbed attention: they take queries into the latent's space and attended latents out of it.

DeepSeek-V2 (2024), section 2.1.2: the key's up-projection is absorbed into the query, the value's follows attention.
"""

import torch

from kernels.act_quant import Quantized, quantize
from kernels.mla_decode import Attended
from kernels.mla_projections import reference

__all__ = ["absorb_query", "expand_attended", "expand_values", "expand_values_quantized"]


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """The queries as `mla_decode` takes them: [tokens, heads, latent + rope], of the query's dtype.

    query: [tokens, heads, nope + rope], not rotated yet, last dimension contiguous; weight: [heads, nope, latent], the
    key's up-projection, last two dimensions contiguous; rotations: [tokens, rope / 2] complex64, contiguous. The first
    part is query[..., :nope] @ weight per head, the second query[..., nope:] rotated. No tokens give none.
    """
    (tokens, heads, width), (nope, latent) = query.shape, weight.shape[1:]
    assert weight.shape[0] == heads and query.dtype == weight.dtype
    assert query.stride(2) == 1 and weight.stride()[1:] == (latent, 1)
    assert rotations.shape == (tokens, (width - nope) // 2) and rotations.is_contiguous()
    if query.is_cuda:
        # Imported here: CUDA's bindings come with a CUDA build of torch.
        from kernels.mla_projections import few_tokens

        if few_tokens.takes_queries(query, weight):
            return few_tokens.absorb_query(query, weight, rotations)
    return reference.absorb_query(query, weight, rotations)


def expand_values(attended: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Project attended latents to values, for each head: [tokens, heads, value].

    attended: [tokens, heads, latent] contiguous; weight: [heads, latent, value], the value's up-projection, transposed
    so that the latent's dimension is contiguous. No tokens give none.
    """
    _check(attended, weight)
    return reference.expand_values(attended, weight)


def expand_values_quantized(attended: torch.Tensor, weight: torch.Tensor) -> Quantized:
    """`expand_values` with all heads' values in one row, [tokens, heads * value], quantized.

    heads * value is a multiple of 128.
    """
    _check(attended, weight)
    if attended.is_cuda:
        from kernels.mla_projections import few_tokens

        if few_tokens.takes_values(attended, weight):
            return few_tokens.expand_values_quantized(attended, weight)
    return quantize(expand_values(attended, weight).flatten(1))


def expand_attended(attended: Attended, weight: torch.Tensor) -> Quantized:
    """`expand_values_quantized` of what attention left: pieces of few tokens are joined in the same kernel."""
    if attended.pieces is not None:
        from kernels.mla_projections import pieces

        _check(attended.latents, weight)
        if pieces.takes(attended, weight):
            return pieces.expand_pieces(attended, weight)
    return expand_values_quantized(attended.joined(), weight)


def _check(attended: torch.Tensor, weight: torch.Tensor) -> None:
    assert weight.shape[:2] == attended.shape[1:] and attended.dtype == weight.dtype
    assert attended.is_contiguous() and weight.stride(1) == 1
