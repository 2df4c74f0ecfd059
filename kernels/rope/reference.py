"""Rotary embedding in plain torch: the definition."""

import math

import torch


def frequencies(dim: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def yarn_frequencies(
    dim: int, theta: float, factor: float, original_positions: int, beta_fast: float, beta_slow: float, truncate: bool
) -> torch.Tensor:
    plain = frequencies(dim, theta)

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # The ramp needs a width even if both ends fall on one pair.
    width = high - low or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / factor * slowed + plain * (1 - slowed)


def rotation_table(radians: torch.Tensor, positions: int, scale: float) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=radians.device), radians)
    return torch.complex(angles.cos() * scale, angles.sin() * scale)


def rotate(x: torch.Tensor, rotations: torch.Tensor, out: torch.Tensor) -> None:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    out.copy_(torch.view_as_real(pairs * rotations.unsqueeze(1)).flatten(-2))
