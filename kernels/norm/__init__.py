"""Root mean square normalization (Zhang and Sennrich, 2019), alone and after a residual addition."""

from types import ModuleType

import torch

from kernels.act_quant import Quantized
from kernels.norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, normalized in float32.

    x: [rows, width], last dimension contiguous; weight: [width] of the same dtype. Returns a new [rows, width]; no rows
    give no rows.
    """
    assert x.dim() == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype and x.stride(1) == 1
    normalized: torch.Tensor = _backend(x).rms_norm(x, weight, epsilon)
    return normalized


def add_rms_norm(delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add `delta` to `residual` in place, and return the sum normalized.

    delta, residual: [rows, width] of one dtype, the residual contiguous, delta's last dimension so; weight: [width].
    """
    assert delta.shape == residual.shape and weight.shape == residual.shape[1:]
    assert residual.is_contiguous() and delta.stride(1) == 1
    normalized: torch.Tensor = _backend(residual).add_rms_norm(delta, residual, weight, epsilon)
    return normalized


def add_rms_norm_quantized(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, Quantized]:
    """`add_rms_norm`, and the same normalized rows quantized: what the gate reads, and what the FP8 products read.

    The width is a multiple of 128.
    """
    assert delta.shape == residual.shape and weight.shape == residual.shape[1:]
    assert residual.is_contiguous() and delta.stride(1) == 1
    normalized, quantized = _backend(residual).add_rms_norm_quantized(delta, residual, weight, epsilon)
    return normalized, quantized


def _backend(x: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        from kernels.norm import triton

        return triton
    return reference
