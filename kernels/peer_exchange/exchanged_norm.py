"""A norm between exchanges, as its caller describes it."""

from dataclasses import dataclass
from enum import Enum, auto

import torch


class SummedRows(Enum):
    """Which rows of the sum over all ranks a rank gets. It has the same rows of the residual."""

    OWN = auto()
    ALL = auto()


@dataclass(frozen=True, slots=True)
class ExchangedNorm:
    """An RMSNorm with the exchange before it, the one after it, or both.

    sums: which rows of a sum over the ranks are added; None if what is added is no part of such a sum. all_rows: set if
    each rank has its own rows and gets the normalized rows of all: how many all of them are, without padding. plain:
    whether normalized rows are wanted in the residual's dtype. quantizes: whether they are wanted in FP8;
    powers: with scales that are powers of two.
    """

    # [width]
    weight: torch.Tensor
    epsilon: float
    sums: SummedRows | None
    all_rows: int | None
    plain: bool
    quantizes: bool
    powers: bool = False

    def __post_init__(self) -> None:
        assert self.sums is not SummedRows.ALL or self.all_rows is None, "every rank has them already"
