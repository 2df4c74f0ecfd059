"""The products around absorbed attention: they take queries into the latent's space and attended latents out of it.

DeepSeek-V2 (2024), section 2.1.2: the key's up-projection is absorbed into the query, the value's follows attention.
"""

import torch

from kernels.act_quant import Quantized, QuantizedRows, empty_quantized, quantize_into
from kernels.few_rows import are_few
from kernels.mla_decode import Attended
from kernels.mla_projections import reference

__all__ = ["absorb_query", "expand_values", "expand_values_into", "expand_values_quantized", "write_and_absorb"]


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
        # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
        from kernels.mla_projections import few_rows, few_tokens

        if few_tokens.takes_queries(query, weight):
            return few_tokens.absorb_query(query, weight, rotations)
        if few_rows.takes(query, weight):
            return few_rows.absorb_query(query, weight, rotations)
    return reference.absorb_query(query, weight, rotations)


def write_and_absorb(
    query: torch.Tensor,
    latents: torch.Tensor,
    weight: torch.Tensor,
    latent_weight: torch.Tensor,
    epsilon: float,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: float = 1.0,
) -> torch.Tensor | None:
    """`norm_and_write` of `kernels.kv_write` without queries, and `absorb_query` of these, in one kernel.

    query: [tokens, heads, nope + rope] and weight: those of `absorb_query`; latents: [tokens, latent + rope], last
    dimension contiguous; the others are those of `norm_and_write`. Returns what `absorb_query` does. None where no
    kernel does both: only for few tokens on Hopper.
    """
    if not query.is_cuda:
        return None
    # Imported here: a machine without a GPU may lack Triton.
    from kernels.mla_projections import few_rows, few_tokens

    rest = query, latents, weight, latent_weight, epsilon, rotations, slots, pool, scale
    if few_rows.takes(query, weight):
        return few_rows.write_and_absorb(*rest)
    if few_tokens.takes_queries(query, weight) and few_tokens.takes_latents(latents, latent_weight, pool):
        return few_tokens.write_and_absorb(*rest)
    return None


def expand_values(attended: Attended, weight: torch.Tensor) -> torch.Tensor:
    """Project attended latents to values, for each head: [tokens, heads, value].

    attended: latents [tokens, heads, latent] contiguous, or pieces of them, which the same kernel joins if tokens are
    few; weight: [heads, latent, value], the value's up-projection, transposed so that the latent's dimension is
    contiguous. No tokens give none.
    """
    _check(attended.latents, weight)
    if attended.latents.is_cuda:
        # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
        from kernels.linear import few_rows
        from kernels.mla_projections import few_tokens, pieces

        if are_few(attended.latents) and pieces.takes(attended, weight):
            return pieces.expand_pieces(attended, weight)
        if few_rows.takes(attended.latents, weight.transpose(1, 2)):
            return few_rows.multiply_groups(attended.joined(), weight.transpose(1, 2))
        if few_tokens.takes_plain_values(attended.latents, weight):
            return few_tokens.expand_values(attended.joined(), weight)
    return reference.expand_values(attended.joined(), weight)


def expand_values_quantized(attended: Attended, weight: torch.Tensor, *, powers: bool = False) -> Quantized:
    """`expand_values` with all heads' values in one row, [tokens, heads * value], quantized.

    heads * value is a multiple of 128. powers: whether scales are powers of two.
    """
    tokens, heads, _ = attended.latents.shape
    out = empty_quantized(tokens, heads * weight.shape[2], device=attended.latents.device, powers=powers)
    expand_values_into(attended, weight, out.rows(0, tokens))
    return out


def expand_values_into(attended: Attended, weight: torch.Tensor, out: QuantizedRows) -> None:
    """As `expand_values_quantized`, but writes to existing rows, whole ones, in their form."""
    _check(attended.latents, weight)
    assert out.values.is_contiguous() and out.values.shape == (len(attended.latents), weight.shape[0] * weight.shape[2])
    if attended.latents.is_cuda:
        from kernels.mla_projections import few_tokens, pieces

        if pieces.takes(attended, weight):
            pieces.expand_pieces_into(attended, weight, out)
            return
        if few_tokens.takes_values(attended.latents, weight):
            few_tokens.expand_values_into(attended.joined(), weight, out)
            return
    quantize_into(reference.expand_values(attended.joined(), weight).flatten(1), out)


def _check(latents: torch.Tensor, weight: torch.Tensor) -> None:
    assert weight.shape[:2] == latents.shape[1:] and latents.dtype == weight.dtype
    assert latents.is_contiguous() and weight.stride(1) == 1
