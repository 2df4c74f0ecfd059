"""An exchange that can be muted. A muted rank uses its own tensors in place of those of all ranks."""

from collections.abc import Sequence

import torch

from engine.exchange.begun import Begun
from engine.exchange.interface import Exchange
from engine.parallel.layout import Group
from kernels.act_quant import Quantized
from kernels.norm import Delta
from kernels.peer_exchange.exchanged_norm import ExchangedNorm


class MutedExchange:
    """engine.exchange.interface.Exchange. While it is muted, the results of steps are meaningless."""

    def __init__(self, exchange: Exchange) -> None:
        self.place = exchange.place
        self.muted = False
        self._exchange = exchange

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        if not self.muted:
            return self._exchange.all_gather(part, group)
        return part.repeat(len(self.place.members(group)), *(1 for _ in part.shape[1:]))

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, beside: bool = False
    ) -> Begun[None]:
        if not self.muted:
            return self._exchange.begin_all_gather(outputs, parts, group, beside=beside)
        for output, part in zip(outputs, parts, strict=True):
            output.unflatten(0, (-1, len(part))).copy_(part)
        return Begun(lambda: None)

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, beside: bool = False) -> Begun[torch.Tensor]:
        if not self.muted:
            return self._exchange.begin_reduce_scatter(values, group, beside=beside)
        return Begun(lambda: values[: len(values) // len(self.place.members(group))])

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        return values if self.muted else self._exchange.all_reduce(values, group)

    def add_rms_norm(
        self, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm, group: Group
    ) -> tuple[torch.Tensor | None, Quantized | None] | None:
        return None if self.muted else self._exchange.add_rms_norm(delta, residual, norm, group)

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        return values if self.muted else self._exchange.broadcast(values, group, source)

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        if not self.muted:
            self._exchange.copy_between(tensors, group, sources)

    def barrier(self, group: Group) -> None:
        if not self.muted:
            self._exchange.barrier(group)

    def check(self) -> None:
        self._exchange.check()
