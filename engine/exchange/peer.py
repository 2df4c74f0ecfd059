"""Exchange between ranks that compute on GPUs of one host, over NVLink."""

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from engine.exchange.host import HostExchange
from engine.exchange.interface import STARTING_SECONDS, Begun, ResultT
from engine.exchange.peer_memory import PeerMemory
from engine.parallel.layout import Group
from engine.parallel.peers import Peers
from kernels.act_quant import Quantized
from kernels.norm import Delta
from kernels.peer_exchange import gather, reduce
from kernels.peer_exchange import norm as norm_kernel
from kernels.peer_exchange.exchanged_norm import ExchangedNorm
from kernels.peer_exchange.reference import sum_in_order
from kernels.peer_exchange.region import MOST_WORD_UNITS, UNIT_BYTES
from mesh.errors import RankLost

# Bytes that a GPU sends in the time of a second hop, 1.3 us. A sum takes one hop if every rank adds up all of it, and
# two if each rank adds up one part and sends that on. It takes one if each rank then sends at most this many bytes more
# than in two; with two ranks it never sends more.
SECOND_HOP_BYTES = 512 << 10
# Lower numbers go first.
HIGH_PRIORITY = -1


class PeerExchange:
    """An `engine.exchange.interface.RankExchange`. Tensors on the CPU go over host memory, to `peers`.

    On the device a call is a kernel on the current stream, or with `overlap` on one side stream for all such calls. It
    may be captured; the host does not wait. All ranks' devices run the calls of a group in the same order, one after
    another: two never use its memory at once.
    """

    overlaps = False

    def __init__(self, peers: Peers, device: torch.device) -> None:
        """Called by all ranks at once. Raises EngineFailed, RankLost."""
        self.place = peers.place
        self.peers = peers
        self._device = device
        self._host = HostExchange(peers)
        self._memory = PeerMemory(self._host, device)
        # Its kernels go before others, so that rows are sent as soon as they are there.
        self._side_stream = torch.cuda.Stream(device, priority=HIGH_PRIORITY)
        self._memory.limit(STARTING_SECONDS)
        self._members = {group: self._memory.members(group) for group in Group if len(self.place.members(group)) > 1}
        # Loaded now, and not at the first call, which may be captured.
        for members in self._members.values():
            gather.load(device, members.ranks)
            reduce.load(device, members.ranks)
            norm_kernel.load(device, members.ranks)

    def regroup(self, peers: Peers) -> None:
        """Go on with the same ranks of this host, which begin together, in a new group."""
        self.peers = peers
        self._host = HostExchange(peers)
        self._memory.renew(self._host)

    def limit(self, seconds: float) -> None:
        """How long the device waits for another rank from now on. Waits until the device has nothing to do."""
        self._memory.limit(seconds)

    def check(self) -> None:
        lost = self._memory.lost
        if lost is not None:
            raise RankLost(f"the GPU of rank {lost} of {self.place.layout.world} has not answered")

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        members = self._members_for(part, group)
        if members is None:
            return self._host.all_gather(part, group)
        output = part.new_empty(members.ranks * part.shape[0], *part.shape[1:])
        gather.gather(members, [output], [part.contiguous()])
        return output

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        members = self._members_for(parts[0], group)
        if members is None:
            return self._host.begin_all_gather(outputs, parts, group)
        return self._begin(lambda: gather.gather(members, outputs, parts), None, parts, overlap)

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        members = self._members_for(values, group)
        if members is None:
            return self._host.begin_reduce_scatter(values, group)
        rows, *rest = values.shape
        parts = _in_place(values).view(members.ranks, -1)
        if not reduce.takes(parts[0]):
            # The kernel does not take these numbers, which no layer adds. They are gathered, then added in rank order.
            own = self.all_gather(parts[None], group)[:, members.own].unbind()
            summed = sum_in_order(own).view(rows // members.ranks, *rest)
            return Begun(lambda: summed)
        output = values.new_empty(rows // members.ranks, *rest)
        if not output.numel():
            return Begun(lambda: output)
        return self._begin(lambda: reduce.reduce_scatter(members, output, parts), output, parts, overlap)

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        members = self._members_for(values, group)
        if members is None:
            return self._host.all_reduce(values, group)
        given = _in_place(values).view(-1)
        if not reduce.takes(given):
            return sum_in_order(self.all_gather(given[None], group).unbind()).view(values.shape)
        ranks, size = members.ranks, given.numel() * given.itemsize
        if size * (ranks - 1) * (ranks - 2) // ranks <= SECOND_HOP_BYTES:
            output = torch.empty_like(given)
            if given.numel():
                reduce.all_reduce(members, output, given)
            return output.view(values.shape)
        return self._in_two(members, given, group)[: given.numel()].view(values.shape)

    def add_rms_norm(
        self, delta: Delta, residual: torch.Tensor, norm: ExchangedNorm, group: Group
    ) -> tuple[torch.Tensor | None, Quantized | None] | None:
        members = self._members_for(residual, group)
        if members is None or not norm_kernel.takes(delta, residual, norm):
            return None
        given = _in_place(delta) if isinstance(delta, torch.Tensor) else delta
        return norm_kernel.add_rms_norm(members, given, residual, norm)

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        members = self._members_for(values, group)
        if members is None:
            return self._host.broadcast(values, group, source)
        given = values.contiguous()
        output = torch.empty_like(given)
        gather.broadcast(members, output, given, source)
        return output

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        members = self._members_for(tensors[0], group)
        if members is None:
            self._host.copy_between(tensors, group, sources)
        else:
            gather.copy_between(members, tensors, sources)

    def barrier(self, group: Group) -> None:
        if group in self._members:
            gather.barrier(self._members[group], self._device)

    def _begin(self, launch: Callable[[], None], made: ResultT, reads: object, overlap: bool) -> Begun[ResultT]:
        """Launch a kernel that fills what is `made`. All tensors belong to the current stream. The memory of what the
        kernel `reads` is given back to that stream when the exchange is finished, no earlier.
        """
        if not overlap:
            launch()
            return Begun(lambda: made)
        self._side_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side_stream):
            launch()
        sent = self._side_stream.record_event()

        def collect() -> ResultT:
            torch.cuda.current_stream(self._device).wait_event(sent)
            return made

        return Begun(collect, reads)

    def _in_two(self, members: ctypes.Structure, given: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum of all ranks' values, perhaps with padding after them: each rank adds up one part, then sends it."""
        whole = members.ranks * UNIT_BYTES // given.itemsize
        padded = functional.pad(given, (0, -given.numel() % whole))
        if padded.numel() * padded.itemsize > members.ranks * MOST_WORD_UNITS * UNIT_BYTES:
            return self.all_gather(self.begin_reduce_scatter(padded, group).finish(), group)
        output = torch.empty_like(padded)
        reduce.all_reduce_in_two(members, output, padded)
        return output

    def _members_for(self, values: torch.Tensor, group: Group) -> ctypes.Structure | None:
        """The group as kernels see it; None if the values go over host memory."""
        self.check()
        return self._members.get(group) if values.is_cuda else None


def _in_place(values: torch.Tensor) -> torch.Tensor:
    """The values as kernels read them: contiguous and aligned, copied if they are not. All ranks then launch the same
    kernels, wherever their values lie.
    """
    whole = values.contiguous()
    return whole if whole.data_ptr() % UNIT_BYTES == 0 else whole.clone()
