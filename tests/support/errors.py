"""The error of a tensor relative to what it should be."""

import torch


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference divided by the norm of `expected`, which may be zero or without elements."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
