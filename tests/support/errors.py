"""The error of a tensor relative to what it should be."""

import torch


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference divided by the norm of `expected`, which may be zero or without elements."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def assert_close(
    found: torch.Tensor,
    expected: torch.Tensor,
    *,
    rtol: float = 1.3e-6,
    atol: float = 1e-5,
    equal_nan: bool = False,
) -> None:
    """As `torch.testing.assert_close`, by default for float32, but without importing sympy, which takes 2 s."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.allclose(found, expected, rtol, atol, equal_nan), f"{found} is not {expected}"
