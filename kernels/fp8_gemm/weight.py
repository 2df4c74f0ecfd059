"""A linear layer's weight as DeepSeek publishes it."""

from dataclasses import dataclass

import torch

BLOCK = 128


@dataclass(frozen=True, slots=True)
class BlockScaled:
    """w ~ values * scales, each scale over its block of 128x128. Two-dimensional, or with a leading expert."""

    # [..., outputs, inputs] float8_e4m3fn, contiguous; inputs a multiple of 128.
    values: torch.Tensor
    # [..., ceil(outputs / 128), inputs / 128] float32, contiguous.
    scales: torch.Tensor


def block_scaled(values: torch.Tensor, scales: torch.Tensor) -> BlockScaled:
    """values: [..., outputs, inputs] float8_e4m3fn; scales: [..., ceil(outputs / 128), inputs / 128] float32."""
    *leading, outputs, inputs = values.shape
    assert values.dtype == torch.float8_e4m3fn and values.is_contiguous() and inputs % BLOCK == 0
    assert scales.shape == (*leading, -(-outputs // BLOCK), inputs // BLOCK)
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    return BlockScaled(values=values, scales=scales)
