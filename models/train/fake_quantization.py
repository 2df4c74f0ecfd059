"""Rounds weights and activations as FP8 does, in differentiable form, so that the last stage of training adapts to
it.
"""

import torch
from torch.nn import functional

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantized_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [..., rows, columns] rounded to e4m3 with one scale per block of 128x128.

    Rows of several matrices may be stacked as long as each has a multiple of 128 of them. The gradient passes unchanged
    (the straight-through estimator of Bengio et al., 2013).
    """
    rows, columns = weight.shape[-2:]
    padded = functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    rounded = _rounded(blocks, dim=(-3, -1)).flatten(-2).flatten(-3, -2)[..., :rows, :columns]
    return weight + (rounded - weight).detach()


def quantized_activation(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., width] rounded to e4m3 with one scale per token and 128 values; the gradient passes unchanged."""
    groups = functional.pad(x, (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    rounded = _rounded(groups, dim=(-1,)).flatten(-2)[..., : x.shape[-1]]
    return x + (rounded - x).detach()


def _rounded(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    values = x.detach().float()
    largest = values.abs().amax(dim=dim, keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    return ((values / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
