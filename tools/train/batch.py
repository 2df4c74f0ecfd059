"""What one step of training sees."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch

# Marks targets that are not to be learned.
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Documents packed one after the other, all of them whole."""

    # int64 [tokens] each.
    tokens: torch.Tensor
    positions: torch.Tensor
    # The next token, and the one after that, where they are to be learned; IGNORED elsewhere.
    targets: torch.Tensor
    second_targets: torch.Tensor
    # int32 [documents + 1] and the bound of their lengths, as in Layout.
    boundaries: torch.Tensor
    longest: int

    def to(self, device: torch.device) -> Self:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """The name by which a DataLoader finds it."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        return replace(
            self,
            tokens=change(self.tokens),
            positions=change(self.positions),
            targets=change(self.targets),
            second_targets=change(self.second_targets),
            boundaries=change(self.boundaries),
        )
