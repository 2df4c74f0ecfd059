"""Root mean square normalization (Zhang and Sennrich, 2019), of two inputs and after a residual addition."""

from types import ModuleType

import torch

from kernels.act_quant import Quantized, empty_quantized
from kernels.moe_permute import ExpertOutputs, combine
from kernels.norm import reference

# The output of a layer, which is added to the residual.
Delta = torch.Tensor | ExpertOutputs


def join_rms_norms(
    first: torch.Tensor, second: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension, normalized in float32: two inputs side by side.

    first, second: [rows, width] of one dtype, last dimension contiguous; the weights: [width] each. Returns a new
    [rows, 2 * width]; no rows give no rows.
    """
    assert first.shape == second.shape and first.dim() == 2 and first.stride(1) == second.stride(1) == 1
    for weight in (first_weight, second_weight):
        assert weight.shape == first.shape[1:] and weight.dtype == first.dtype == second.dtype
    joined: torch.Tensor = _backend(first).join_rms_norms(first, second, first_weight, second_weight, epsilon)
    return joined


def add_rms_norm(delta: Delta, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Add `delta` to `residual` in place, and return the sum normalized as `join_rms_norms` does.

    delta, residual: [rows, width] of one dtype, the residual contiguous, and delta's last dimension. Experts'
    outputs are added up first, and rounded. weight: [width].
    """
    _check(delta, residual, weight)
    normalized: torch.Tensor
    if (clusters := _clusters(delta, residual)) is not None:
        normalized = clusters.add_rms_norm(delta, residual, weight, epsilon, None)
        return normalized
    normalized = _backend(residual).add_rms_norm(_added_up(delta), residual, weight, epsilon)
    return normalized


def add_rms_norm_quantized(
    delta: Delta, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, Quantized]:
    """`add_rms_norm`, and the normalized rows quantized. The gate reads the former, FP8 products the latter.

    The width is a multiple of 128.
    """
    _check(delta, residual, weight)
    if (clusters := _clusters(delta, residual)) is not None:
        quantized = empty_quantized(*residual.shape, device=residual.device)
        return clusters.add_rms_norm(delta, residual, weight, epsilon, quantized), quantized
    normalized, quantized = _backend(residual).add_rms_norm_quantized(_added_up(delta), residual, weight, epsilon)
    return normalized, quantized


def _check(delta: Delta, residual: torch.Tensor, weight: torch.Tensor) -> None:
    assert delta.shape == residual.shape and weight.shape == residual.shape[1:] and residual.is_contiguous()
    assert isinstance(delta, ExpertOutputs) or delta.stride(1) == 1


def _added_up(delta: Delta) -> torch.Tensor:
    return combine(delta) if isinstance(delta, ExpertOutputs) else delta


def _clusters(delta: Delta, residual: torch.Tensor) -> ModuleType | None:
    """The module whose kernel has a cluster of CTAs for each row; None if it does not take these."""
    if not residual.is_cuda:
        return None
    from kernels.norm import clusters

    return clusters if clusters.takes(delta, residual) else None


def _backend(x: torch.Tensor) -> ModuleType:
    if x.is_cuda:
        from kernels.norm import triton

        return triton
    return reference
