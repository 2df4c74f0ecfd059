"""A batch on the training device."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from models.train.batch import Batch


@dataclass(frozen=True)
class DeviceBatch:
    """The arrays of a Batch."""

    # int64 [tokens] each.
    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    second_targets: torch.Tensor
    # int32 [documents + 1].
    boundaries: torch.Tensor
    longest: int

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Self:
        return cls(
            tokens=_moved(batch.tokens, device).long(),
            positions=_moved(batch.positions, device).long(),
            targets=_moved(batch.targets, device).long(),
            second_targets=_moved(batch.second_targets, device).long(),
            boundaries=_moved(batch.boundaries, device),
            longest=batch.longest,
        )

    def overwrite(self, batch: Batch) -> None:
        """Copy another batch of the same shape into these tensors, whose addresses stay the same."""
        assert batch.longest == self.longest
        device = self.tokens.device
        self.tokens.copy_(_moved(batch.tokens, device))
        self.positions.copy_(_moved(batch.positions, device))
        self.targets.copy_(_moved(batch.targets, device))
        self.second_targets.copy_(_moved(batch.second_targets, device))
        self.boundaries.copy_(_moved(batch.boundaries, device))


def _moved(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
