"""The exchange of a worker of one rank."""

from collections.abc import Sequence

import torch

from engine.exchange.interface import Begun
from engine.parallel.layout import Group, Place


class Alone:
    """An `engine.exchange.interface.RankExchange`."""

    overlaps = False

    def __init__(self, place: Place | None = None) -> None:
        """place: by default that of a worker's only rank. A model that is never run may have another: it then tells
        what a rank at that place would hold.
        """
        self.place = place or Place()

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        return part

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(part)
        return Begun(lambda: None)

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        return Begun(lambda: values)

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        return values

    def add_rms_norm(self, *given: object, **more: object) -> None:
        """Returns None: kernels of one rank compute this, between calls of the exchange."""

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        return values

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        pass

    def barrier(self, group: Group) -> None:
        pass

    def check(self) -> None:
        pass
