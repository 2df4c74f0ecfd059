"""How rows are drawn: as plain data on the host, and as tensors on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from kernels.host_copy import to_device


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw one row. temperature > 0; top_k 0 and min_p 0 keep all; position is the drawn token's."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    position: int
    min_p: float = 0.0

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p may exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Draws:
    """The draws of all rows, [rows] each: temperature, top_p and min_p float64, the others int64."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Self:
        """packed: from `pack_draws`."""
        temperature, top_p, min_p = packed[:3].view(torch.float64)
        return cls(temperature, top_p, min_p, *packed[3:])


def pack_draws(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    """[6, rows] int64 on the device, copied in the stream's order. A seed is cut to its low 64 bits."""
    packed = np.empty((6, len(draws)), np.int64)
    packed[0] = np.array([item.temperature for item in draws], np.float64).view(np.int64)
    packed[1] = np.array([item.top_p for item in draws], np.float64).view(np.int64)
    packed[2] = np.array([item.min_p for item in draws], np.float64).view(np.int64)
    packed[3] = [item.top_k for item in draws]
    packed[4] = np.array([item.seed & 0xFFFFFFFFFFFFFFFF for item in draws], np.uint64).view(np.int64)
    packed[5] = [item.position for item in draws]
    return to_device(packed, device)
