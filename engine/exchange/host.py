"""Exchange between ranks that compute on CPUs, over host memory."""

from collections.abc import Iterator, Sequence

import torch

from engine.parallel.layout import Group
from engine.parallel.meeting import Meeting
from engine.parallel.peers import TENSOR_SLOT_BYTES, Peers
from kernels.peer_exchange.reference import sum_in_order


class HostExchange:
    """engine.exchange.interface.Exchange. Tensors larger than a slot of a meeting take several meetings."""

    def __init__(self, peers: Peers) -> None:
        self.place = peers.place
        self._peers = peers

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        meeting = self._peers.tensors(group)
        if len(meeting.members) == 1:
            return part
        given = part.contiguous().flatten()
        gathered = given.new_empty(len(meeting.members), given.numel())
        for piece in _pieces(given.numel(), given.itemsize):
            for index, values in enumerate(_meet(meeting, given[piece])):
                gathered[index, piece] = values
        return gathered.view(-1, *part.shape[1:])

    def all_gather_into(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group) -> None:
        for output, part in zip(outputs, parts, strict=True):
            output.copy_(self.all_gather(part, group))

    def reduce_scatter(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        meeting = self._peers.tensors(group)
        if len(meeting.members) == 1:
            return values
        ranks = len(meeting.members)
        # One part for each rank.
        parts = values.contiguous().view(ranks, -1)
        own = meeting.members.index(self.place.rank)
        summed = values.new_empty(parts.shape[1])
        for piece in _pieces(parts.shape[1], ranks * parts.itemsize):
            everybody = _meet(meeting, parts[:, piece])
            summed[piece] = sum_in_order([theirs.view(ranks, -1)[own] for theirs in everybody])
        return summed.view(values.shape[0] // ranks, *values.shape[1:])

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        meeting = self._peers.tensors(group)
        if len(meeting.members) == 1:
            return values
        given = values.contiguous().flatten()
        summed = torch.empty_like(given)
        for piece in _pieces(given.numel(), given.itemsize):
            summed[piece] = sum_in_order(_meet(meeting, given[piece]))
        return summed.view(values.shape)

    def add_rms_norm(self, *given: object, **more: object) -> None:
        """Computed by the kernels of one rank, between calls of the exchange."""

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        meeting = self._peers.tensors(group)
        if len(meeting.members) == 1:
            return values
        given = values.contiguous().flatten()
        received = torch.empty_like(given)
        for piece in _pieces(given.numel(), given.itemsize):
            received[piece] = _meet(meeting, given[piece])[source]
        return received.view(values.shape)

    def barrier(self, group: Group) -> None:
        meeting = self._peers.tensors(group)
        meeting.arrive()
        meeting.wait()

    def check(self) -> None:
        """Every call has told by itself."""


def _meet(meeting: Meeting, values: torch.Tensor) -> list[torch.Tensor]:
    """The values of all members, flat; to be read before the next meeting."""
    size_bytes = values.numel() * values.itemsize
    _tensor(meeting.slot, size_bytes, values.dtype).copy_(values.flatten())
    meeting.arrive()
    meeting.wait()
    return [_tensor(meeting.written(member), size_bytes, values.dtype) for member in meeting.members]


def _tensor(slot: memoryview, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(slot[:size_bytes], dtype=dtype)


def _pieces(count: int, item_bytes: int) -> Iterator[slice]:
    """Parts of `count` items that fit a slot."""
    most = TENSOR_SLOT_BYTES // item_bytes
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))
