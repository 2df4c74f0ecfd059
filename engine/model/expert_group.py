"""The ranks that hold a model's routed experts together (expert parallelism, GShard, 2020).

Few ranks exchange all their rows: each computes what its experts make of everybody's rows and adds that up, and the
sums travel back. That moves no more than a copy for each expert a token chose, and every size is known beforehand.
"""

import torch

from engine.exchange.interface import Exchange
from engine.model.share import Share
from engine.parallel.layout import Group


class ExpertGroup:
    """Every rank of the worker makes the same calls in the same order, with equally many rows.

    Attributes:
        ranks: how many.
        share: which of the experts this rank holds.
        width_share: which part of each of them, as neighbours share experts if there are fewer parts than ranks.
        divides: there is more than one rank.
    """

    def __init__(self, exchange: Exchange) -> None:
        place, layout = exchange.place, exchange.place.layout
        self._exchange = exchange
        self.ranks = layout.world
        self.share = Share(place.expert_part, layout.ep)
        self.width_share = Share(place.width_part, layout.width_parts)
        self.divides = layout.world > 1

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks: [rows, ...] becomes [ranks * rows, ...]."""
        return self._exchange.all_gather(own, Group.WORLD)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sums of what all ranks make of this one's rows: [ranks * rows, width] becomes [rows, width]."""
        return self._exchange.reduce_scatter(parts, Group.WORLD)
