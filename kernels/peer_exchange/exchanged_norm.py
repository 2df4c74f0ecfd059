"""A norm between exchanges, as its caller describes it."""

from dataclasses import dataclass
from enum import Enum, auto

import torch


class SummedRows(Enum):
    """Which rows of the sum of all ranks' parts a rank gets, and has of the residual."""

    OWN = auto()
    ALL = auto()


@dataclass(frozen=True, slots=True)
class ExchangedNorm:
    """An RMSNorm with the exchange before it, the one behind it, or both.

    sums: None if the rows that are added are no parts of a sum over the ranks. all_rows: how many rows all ranks have
    together, the last ones without their padding, if each has its own and gets the normalized ones of all. plain: these
    are wanted in the residual's dtype. quantizes: they are wanted in FP8.
    """

    # [width]
    weight: torch.Tensor
    epsilon: float
    sums: SummedRows | None
    all_rows: int | None
    plain: bool
    quantizes: bool

    def __post_init__(self) -> None:
        assert self.sums is not SummedRows.ALL or self.all_rows is None, "every rank has them already"
