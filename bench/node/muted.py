"""Exchanges that are left out, to tell what a rank computes from what it waits for."""

from collections.abc import Sequence

import torch

from engine.exchange.alone import Alone
from engine.exchange.interface import Begun, RankExchange
from engine.parallel.layout import Group
from kernels.act_quant import Quantized
from kernels.norm import Delta
from kernels.peer_exchange.exchanged_norm import ExchangedNorm


class NoExchange(Alone):
    """engine.exchange.interface.RankExchange of a rank that uses its own tensors in place of those of all ranks.

    There need be no other ranks. The results of steps are meaningless.
    """

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        return part.repeat(len(self.place.members(group)), *(1 for _ in part.shape[1:]))

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        wholes = [output.unflatten(0, (-1, len(part))) for output, part in zip(outputs, parts, strict=True)]
        return super().begin_all_gather(wholes, parts, group, overlap=overlap)

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        return Begun(lambda: values[: len(values) // len(self.place.members(group))])


class MutedExchange:
    """engine.exchange.interface.RankExchange that is left out while it is muted."""

    def __init__(self, exchange: RankExchange) -> None:
        self.place = exchange.place
        self.overlaps = exchange.overlaps
        self.muted = False
        self._exchange, self._none = exchange, NoExchange(exchange.place)

    @property
    def _way(self) -> RankExchange:
        return self._none if self.muted else self._exchange

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        return self._way.all_gather(part, group)

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        return self._way.begin_all_gather(outputs, parts, group, overlap=overlap)

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        return self._way.begin_reduce_scatter(values, group, overlap=overlap)

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        return self._way.all_reduce(values, group)

    def add_rms_norm(
        self, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm, group: Group
    ) -> tuple[torch.Tensor | None, Quantized | None] | None:
        return self._way.add_rms_norm(delta, residual, norm, group)

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        return self._way.broadcast(values, group, source)

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        self._way.copy_between(tensors, group, sources)

    def barrier(self, group: Group) -> None:
        self._way.barrier(group)

    def check(self) -> None:
        self._exchange.check()
