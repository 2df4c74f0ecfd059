"""What a model asks of the other ranks."""

from typing import Protocol

import torch

from engine.parallel.layout import Group, Place


class Exchange(Protocol):
    """Every rank of a group makes the same calls in the same order, with tensors of one shape and dtype.

    Results are new tensors, or the given ones in a group of one rank; nobody changes the given ones. Every call raises
    RankLost if another rank has ended or hangs.

    Attributes:
        place: this rank's.
    """

    place: Place

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        """The parts of all ranks, in the order of their ranks: [rows, ...] becomes [ranks * rows, ...]."""
        ...

    def reduce_scatter(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        """This rank's part of the sum of all ranks' values: [ranks * rows, ...] becomes [rows, ...]."""
        ...

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum of all ranks' values. Every rank adds in the order of the ranks: their sums are equal bit by bit."""
        ...

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        """The values of one rank; source: its index in the group. Of the others only shape and dtype count."""
        ...

    def barrier(self, group: Group) -> None:
        """Wait until all ranks of the group are here."""
        ...
