"""Rotary position embedding of interleaved pairs, with plain and with YaRN's frequencies."""

from types import ModuleType

import torch

from kernels.rope import reference


def frequencies(dim: int, theta: float) -> torch.Tensor:
    """Plain RoPE (Su et al., 2021): [dim / 2] float32 radians per position, theta^(-2i/dim)."""
    assert dim % 2 == 0
    return reference.frequencies(dim, theta)


def yarn_frequencies(
    dim: int,
    theta: float,
    *,
    factor: float,
    original_positions: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool = True,
) -> torch.Tensor:
    """YaRN (Peng et al., 2023, section 3.2): [dim / 2] float32 radians per position.

    Pairs that turn more than `beta_fast` times in `original_positions` keep their frequency. Pairs that turn less than
    `beta_slow` times are slowed down by `factor`. A linear ramp lies between them; `truncate` widens it to whole pairs.
    """
    assert dim % 2 == 0 and factor > 0
    return reference.yarn_frequencies(dim, theta, factor, original_positions, beta_fast, beta_slow, truncate)


def rotation_table(radians: torch.Tensor, positions: int, scale: float = 1.0) -> torch.Tensor:
    """Rotations of positions 0..positions-1: [positions, dim / 2] complex64, scale * exp(i * position * radians)."""
    assert radians.dim() == 1 and radians.dtype == torch.float32
    return reference.rotation_table(radians, positions, scale)


def rotate_(x: torch.Tensor, rotations: torch.Tensor) -> None:
    """Rotate the pairs (x[..., 0], x[..., 1]), (x[..., 2], x[..., 3]), ... in place: `rotate` into itself."""
    rotate(x, rotations, x)


def rotate(x: torch.Tensor, rotations: torch.Tensor, out: torch.Tensor) -> None:
    """Rotate the pairs (x[..., 0], x[..., 1]), (x[..., 2], x[..., 3]), ... in float32, and write them to `out`.

    x, out: [rows, heads, dim] of one dtype, the same tensor or without overlap; last dimension contiguous, other
    strides even; rotations: [rows, dim / 2] complex64 contiguous, one row of the table per row of x. No rows: no-op.
    """
    rows, _, dim = x.shape
    assert rotations.shape == (rows, dim // 2) and rotations.dtype == torch.complex64
    assert x.stride(-1) == out.stride(-1) == 1 and x.shape == out.shape and x.dtype == out.dtype
    _backend(x).rotate(x, rotations, out)


def _backend(x: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        from kernels.rope import triton

        return triton
    return reference
