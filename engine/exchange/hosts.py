"""Exchange between ranks on several hosts: within a host over that host's own exchange, between hosts over rails.

A rail joins the ranks with the same number on their hosts, so that what a rank sends leaves its host once for each
other host, and not once for each rank there; and sums are made within a host before they travel.
"""

from collections.abc import Sequence

import torch

from engine.exchange.interface import Begun, RankExchange
from engine.exchange.rail import Rail
from engine.parallel.layout import Group, Place
from kernels.act_quant import Quantized
from kernels.norm import Delta
from kernels.peer_exchange.exchanged_norm import ExchangedNorm
from kernels.peer_exchange.reference import sum_in_order


class HostsExchange:
    """An `engine.exchange.interface.RankExchange`. The sums of a reduce-scatter are rounded once on each host, and once
    more.

    An exchange that is begun travels between hosts until it is finished, whether `overlap` is set or not.
    """

    overlaps = True

    def __init__(self, place: Place, within: RankExchange, rail: Rail, device: torch.device) -> None:
        """within: the exchange of this rank's host alone; rail: to the ranks with its number on other hosts."""
        self._device = device
        self._take(place, within, rail)
        # Rails of former groups. They are never freed, because that may wait for minutes.
        self._former: list[Rail] = []

    def regroup(self, place: Place, within: RankExchange, rail: Rail) -> None:
        """Go on with the ranks of a new group, which begin together."""
        self._former.append(self._rail)
        self._take(place, within, rail)

    def leave(self) -> None:
        """Wait for no rank of another host any more, since one was lost. The next call is `regroup`."""
        self._rail.leave()

    def _take(self, place: Place, within: RankExchange, rail: Rail) -> None:
        self.place, self._within, self._rail = place, within, rail
        self._hosts, self._ranks_a_host = place.layout.hosts, place.layout.ranks_a_host

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        if group is Group.TP:
            return self._within.all_gather(part, group)
        return self._spread(self._rail.begin_gather(part).finish())

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        if group is Group.TP:
            return self._within.begin_all_gather(outputs, parts, group, overlap=overlap)
        gathered = [self._of_rail(output, part) for output, part in zip(outputs, parts, strict=True)]
        begun = self._rail.begin_gathers(gathered, parts)

        def collect() -> None:
            begun.finish()
            for output, of_rail in zip(outputs, gathered, strict=True):
                if of_rail.data_ptr() != output.data_ptr():
                    output.copy_(self._spread(of_rail))

        return Begun(collect)

    def _of_rail(self, output: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Room for the parts of this rank's rail, [hosts, rows, ...]: the output itself if there is no other rail."""
        if self._ranks_a_host == 1 and output.is_contiguous():
            return output.view(self._hosts, *part.shape)
        return part.new_empty(self._hosts, *part.shape)

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        if group is Group.TP:
            return self._within.begin_reduce_scatter(values, group, overlap=overlap)
        by_host = values.unflatten(0, (self._hosts, self._ranks_a_host, len(values) // self.place.layout.world))
        by_number = by_host.transpose(0, 1).flatten(0, 1)
        # For this rank's number on each host, the sum of those on this host.
        parts = self._within.begin_reduce_scatter(by_number, group).finish()
        swapped = self._rail.begin_swap(parts)
        return Begun(lambda: sum_in_order(swapped.finish().unbind()))

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        if group is Group.TP:
            return self._within.all_reduce(values, group)
        return sum_in_order(self.all_gather(values[None], group).unbind())

    def add_rms_norm(
        self, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm, group: Group
    ) -> tuple[torch.Tensor | None, Quantized | None] | None:
        if group is not Group.TP:
            return None
        return self._within.add_rms_norm(delta, residual, norm, group)

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        if group is Group.TP:
            return self._within.broadcast(values, group, source)
        host, number = divmod(source, self._ranks_a_host)
        # Only ranks with the source's number on their hosts are on its rail.
        if self.place.on_host.rank == number:
            values = self._rail.broadcast(values, host)
        return self._within.broadcast(values, group, number)

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        if group is Group.TP:
            self._within.copy_between(tensors, group, sources)
            return
        # What other hosts send is there before any tensor changes.
        arrived = self._from_other_hosts(tensors, sources)
        first, size = self.place.host * self._ranks_a_host, self._ranks_a_host
        within = [source - first for source in sources[first : first + size]]
        own = [source if 0 <= source < size else number for number, source in enumerate(within)]
        if own != list(range(size)):
            self._within.copy_between(tensors, group, own)
        for tensor, values in zip(tensors, arrived or tensors, strict=True):
            tensor.copy_(values)

    def _from_other_hosts(self, tensors: Sequence[torch.Tensor], sources: Sequence[int]) -> list[torch.Tensor]:
        """The tensors of this rank's source if that lies on another host; else none. Nothing is sent to other ranks.

        A rail carries them to the rank with the source's number, which passes them on within its host.
        """
        size, host, own = self._ranks_a_host, self.place.host, self.place.on_host.rank
        arrived: list[torch.Tensor] = []
        # The ranks of one number after those of another: on no rail does a rank get the tensors of two.
        for number in range(size):
            wanted = list(enumerate(sources[number::size]))
            rail = [at // size if at % size == own else to for to, at in wanted]
            carried: list[torch.Tensor] = []
            if rail != list(range(self._hosts)):
                carried = [self._rail.copy_between(tensor, rail) for tensor in tensors]
            source_host, relay = divmod(sources[host * size + number], size)
            if source_host == host:
                continue
            if relay != number:
                carried = self._passed_on(carried, tensors, relay, number)
            if own == number:
                arrived = carried
        return arrived

    def _passed_on(
        self, carried: list[torch.Tensor], like: Sequence[torch.Tensor], relay: int, number: int
    ) -> list[torch.Tensor]:
        """What the rank `relay` of this host has carried, on the rank `number`. Called by all ranks of the host."""
        own, sources = self.place.on_host.rank, list(range(self._ranks_a_host))
        sources[number] = relay
        if own == number:
            carried = [torch.empty_like(tensor) for tensor in like]
        # Other ranks neither send nor receive.
        self._within.copy_between(carried if own in (relay, number) else like, Group.WORLD, sources)
        return carried

    def barrier(self, group: Group) -> None:
        if group is Group.WORLD:
            self._rail.begin_gather(torch.zeros(1, device=self._device)).finish()
        self._within.barrier(group)

    def check(self) -> None:
        self._rail.check()
        self._within.check()

    def _spread(self, of_rail: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, in their order, from those of this rank's rail: [hosts, rows, ...]."""
        gathered = self._within.all_gather(of_rail.flatten(0, 1), Group.WORLD)
        by_number = gathered.view(self._ranks_a_host, *of_rail.shape)
        return by_number.transpose(0, 1).flatten(0, 2)
