"""The products around absorbed attention in plain torch: the definition, and for many tokens on a GPU."""

import torch

from kernels.rope import rotate


def absorb_query(query: torch.Tensor, weight: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    tokens, heads, _ = query.shape
    nope, latent = weight.shape[1:]
    out = query.new_empty(tokens, heads, latent + query.shape[2] - nope)
    # Writes straight into the tensor that attention reads.
    torch.bmm(query[:, :, :nope].transpose(0, 1), weight, out=out[:, :, :latent].transpose(0, 1))
    rotate(query[:, :, nope:], rotations, out[:, :, latent:])
    return out


def expand_values(attended: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tokens, heads, _ = attended.shape
    out = attended.new_empty(tokens, heads, weight.shape[2])
    torch.bmm(attended.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out
