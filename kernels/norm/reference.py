"""Normalization in plain torch: the definition."""

import torch
from torch.nn import functional

from kernels.act_quant import Quantized, quantize_into


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, epsilon)
    return functional.rms_norm(x.float(), weight.shape, None, epsilon).to(x.dtype) * weight


def join_rms_norms(
    first: torch.Tensor, second: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    return torch.cat((rms_norm(first, first_weight, epsilon), rms_norm(second, second_weight, epsilon)), dim=1)


def add_rms_norm(
    delta: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    plain: torch.Tensor | None,
    quantized: Quantized | None,
) -> None:
    normalized = rms_norm(residual.add_(delta), weight, epsilon)
    if plain is not None:
        plain.copy_(normalized)
    if quantized is not None:
        quantize_into(normalized, quantized.rows(0, len(normalized)))
