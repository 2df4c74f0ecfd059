"""Scratch memory that the products of one stream use one after the other."""

from dataclasses import dataclass

import torch

# Tiles of one product that several programs share, each with a counter.
MOST_SHARED_TILES = 1024


@dataclass(frozen=True, slots=True)
class Workspace:
    """Belongs to one stream: products of different streams, or graphs that run at the same time, must not share it."""

    # [1024] int32, zero between calls: programs that share a tile of a product count themselves here.
    arrivals: torch.Tensor
    # Whether a kernel of another stream holds most multiprocessors meanwhile: CTAs that run only together with others
    # would find no room.
    beside: bool


def make_workspace(device: torch.device, *, beside: bool = False) -> Workspace:
    return Workspace(torch.zeros(MOST_SHARED_TILES, dtype=torch.int32, device=device), beside)
