"""A norm between exchanges, as its caller describes it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ExchangedNorm:
    """An RMSNorm with the exchange before it, the one behind it, or both.

    sums: the rows that are added are a sum over the ranks, of which each rank gives a part and gets its rows.
    all_rows: how many rows all ranks have together, the last ones without their padding, if every rank gets all of
    them. quantizes: they are wanted in FP8 too.
    """

    # [width]
    weight: torch.Tensor
    epsilon: float
    sums: bool
    all_rows: int | None
    quantizes: bool
