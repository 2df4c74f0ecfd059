"""What a product takes besides rows: a weight as DeepSeek publishes it, and the scratch memory of a stream."""

from dataclasses import dataclass

import torch

BLOCK = 128
# Tiles of one product that several programs share, each with a counter.
MOST_SHARED_TILES = 1024


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


@dataclass(frozen=True, slots=True)
class Workspace:
    """Belongs to one stream: products of different streams, or graphs that run at the same time, must not share it."""

    # [1024] int32, zero between calls: programs that share a tile of a product count themselves here.
    arrivals: torch.Tensor
    # Whether a kernel of another stream holds most multiprocessors meanwhile: CTAs that run only together with others
    # would find no room.
    shares_chip: bool


def make_workspace(device: torch.device, *, shares_chip: bool = False) -> Workspace:
    return Workspace(torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device), shares_chip)
