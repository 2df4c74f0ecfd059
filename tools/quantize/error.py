"""The error of quantized weights relative to those of the source."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Error:
    """Sums of squares over all weights: of the differences, and of the source's weights."""

    difference: float = 0.0
    source: float = 0.0

    @property
    def relative(self) -> float:
        """Root mean square of the differences divided by that of the weights."""
        return (self.difference / self.source) ** 0.5 if self.source else 0.0


def error_of(found: torch.Tensor, source: torch.Tensor) -> Error:
    difference = torch.linalg.vector_norm(found - source) ** 2
    return Error(float(difference), float(torch.linalg.vector_norm(source) ** 2))


def total(errors: Iterable[Error]) -> Error:
    listed = list(errors)
    return Error(sum(each.difference for each in listed), sum(each.source for each in listed))
