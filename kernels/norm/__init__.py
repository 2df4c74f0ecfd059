"""Root mean square normalization (Zhang and Sennrich, 2019), alone and after a residual addition."""

import torch

from kernels.act_quant import Quantized
from kernels.norm import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, normalized in float32.

    x: [rows, width], last dimension contiguous; weight: [width] of the same dtype. Returns a new [rows, width]; no rows
    give no rows. Backend: the reference.
    """
    assert x.dim() == 2 and weight.shape == x.shape[1:] and weight.dtype == x.dtype
    return reference.rms_norm(x, weight, epsilon)


def add_rms_norm(delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add `delta` to `residual` in place, and return the sum normalized.

    delta, residual: [rows, width] of one dtype; weight: [width]. Backend: the reference.
    """
    assert delta.shape == residual.shape and weight.shape == residual.shape[1:]
    return reference.add_rms_norm(delta, residual, weight, epsilon)


def add_rms_norm_quantized(
    delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, Quantized]:
    """`add_rms_norm`, and the same normalized rows quantized: what the gate reads, and what the FP8 products read.

    The width is a multiple of 128.
    """
    assert delta.shape == residual.shape and weight.shape == residual.shape[1:]
    return reference.add_rms_norm_quantized(delta, residual, weight, epsilon)
