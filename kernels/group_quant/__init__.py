"""INT4 weights as they are published: groups of 128 inputs with a scale each, two weights a byte."""

import torch

from kernels.group_quant import reference

GROUP = reference.GROUP


def quantize_groups(weight: torch.Tensor, importance: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest of -7 to 7 times each group's scale.

    weight: [outputs, inputs], any float dtype, inputs a multiple of 128; importance: [inputs] float32. Without it, each
    group's largest magnitude becomes 7; with it, the share of 0.7 to 1 of the largest does for which the sum of the
    squared errors times the importance of their inputs is least. Returns (packed [outputs, inputs / 2] int8, the first
    weight in the low half, scales [outputs, inputs / 128] float32 that bfloat16 can hold), with weight ~ integers *
    scales. A group of zeros has scale 1. Backend: the reference.
    """
    assert weight.dim() == 2 and weight.is_floating_point() and weight.shape[1] % GROUP == 0
    assert importance is None or importance.shape == weight.shape[1:]
    return reference.quantize_groups(weight, importance)


def dequantize_groups(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """integers * scales: [outputs, inputs] float32, of what `quantize_groups` returns. Backend: the reference."""
    assert packed.dtype == torch.int8 and packed.shape[1] * 2 == scales.shape[1] * GROUP
    assert packed.shape[0] == scales.shape[0] and scales.dtype == torch.float32
    return reference.dequantize_groups(packed, scales)
