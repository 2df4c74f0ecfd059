"""Exchange between ranks that compute on CPUs, over host memory."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeVar

import torch

from engine.exchange.interface import Begun
from engine.parallel.layout import Group
from engine.parallel.meeting import Meeting
from engine.parallel.peers import TENSOR_SLOT_BYTES, Peers
from kernels.peer_exchange.reference import sum_in_order

ALIGNMENT_BYTES = 16
BegunT = TypeVar("BegunT", Begun[None], Begun[torch.Tensor])


class HostExchange:
    """An `engine.exchange.interface.RankExchange`. Tensors larger than a slot of a meeting take several meetings.

    An exchange writes its tensors to a meeting's slot when it is begun, if they fit. It reads what the others wrote
    when it is finished, or when the next exchange of the group begins. Other ranks may arrive until then.
    """

    overlaps = False

    def __init__(self, peers: Peers) -> None:
        self.place = peers.place
        self._peers = peers
        # By group, the exchange that was begun last, finished or not.
        self._begun: dict[Group, Begun[None] | Begun[torch.Tensor]] = {}

    def all_gather(self, part: torch.Tensor, group: Group) -> torch.Tensor:
        meeting = self._meeting(group)
        return part if len(meeting.members) == 1 else _gathered(meeting, part)

    def begin_all_gather(
        self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], group: Group, *, overlap: bool = False
    ) -> Begun[None]:
        meeting = self._meeting(group)
        pairs = [(output, part) for output, part in zip(outputs, parts, strict=True) if part.numel()]
        *offsets, size = accumulate((_whole(part.numel() * part.itemsize) for _, part in pairs), initial=0)
        if size > TENSOR_SLOT_BYTES:
            return self._note(group, Begun(lambda: _gather_each(meeting, pairs)))
        for offset, (_, part) in zip(offsets, pairs, strict=True):
            _tensor(meeting.slot[offset:], part).copy_(part)
        meeting.arrive()

        def collect() -> None:
            meeting.wait()
            for index, member in enumerate(meeting.members):
                for offset, (output, part) in zip(offsets, pairs, strict=True):
                    theirs = _tensor(meeting.written(member)[offset:], part)
                    output[index * len(part) : (index + 1) * len(part)] = theirs

        return self._note(group, Begun(collect))

    def begin_reduce_scatter(self, values: torch.Tensor, group: Group, *, overlap: bool = False) -> Begun[torch.Tensor]:
        meeting = self._meeting(group)
        if len(meeting.members) == 1:
            return Begun(lambda: values)
        own = meeting.members.index(self.place.rank)
        # One part for each rank.
        parts = values.contiguous().view(len(meeting.members), -1)
        shape = values.shape[0] // len(parts), *values.shape[1:]
        if not 0 < parts.numel() * parts.itemsize <= TENSOR_SLOT_BYTES:
            return self._note(group, Begun(lambda: _sums(meeting, parts, own).view(shape)))
        _bring(meeting, parts)

        def collect() -> torch.Tensor:
            return sum_in_order([theirs[own] for theirs in _brought(meeting, parts)]).view(shape)

        return self._note(group, Begun(collect))

    def all_reduce(self, values: torch.Tensor, group: Group) -> torch.Tensor:
        meeting = self._meeting(group)
        if len(meeting.members) == 1:
            return values
        given = values.contiguous().flatten()
        summed = torch.empty_like(given)
        for piece in _pieces(given.numel(), given.itemsize):
            summed[piece] = sum_in_order(_meet(meeting, given[piece]))
        return summed.view(values.shape)

    def add_rms_norm(self, *given: object, **more: object) -> None:
        """Returns None: kernels of one rank compute this, between calls of the exchange."""

    def broadcast(self, values: torch.Tensor, group: Group, source: int) -> torch.Tensor:
        meeting = self._meeting(group)
        if len(meeting.members) == 1:
            return values
        given = values.contiguous().flatten()
        received = torch.empty_like(given)
        for piece in _pieces(given.numel(), given.itemsize):
            received[piece] = _meet(meeting, given[piece])[source]
        return received.view(values.shape)

    def copy_between(self, tensors: Sequence[torch.Tensor], group: Group, sources: Sequence[int]) -> None:
        meeting = self._meeting(group)
        if len(meeting.members) == 1:
            return
        source = sources[meeting.members.index(self.place.rank)]
        for tensor in tensors:
            # Viewed as bytes, because not every operation takes one-byte floats.
            values = tensor.view(-1).view(torch.uint8)
            for piece in _pieces(values.numel(), values.itemsize):
                values[piece] = _meet(meeting, values[piece])[source]

    def barrier(self, group: Group) -> None:
        meeting = self._meeting(group)
        meeting.arrive()
        meeting.wait()

    def check(self) -> None:
        """Nothing to do: every call has raised RankLost itself."""

    def _meeting(self, group: Group) -> Meeting:
        """The group's meeting, after the exchange that was begun there last is finished."""
        begun = self._begun.pop(group, None)
        if begun is not None:
            begun.finish()
        return self._peers.tensors(group)

    def _note(self, group: Group, begun: BegunT) -> BegunT:
        self._begun[group] = begun
        return begun


def _gathered(meeting: Meeting, part: torch.Tensor) -> torch.Tensor:
    given = part.contiguous().flatten()
    gathered = given.new_empty(len(meeting.members), given.numel())
    for piece in _pieces(given.numel(), given.itemsize):
        for index, values in enumerate(_meet(meeting, given[piece])):
            gathered[index, piece] = values
    return gathered.view(-1, *part.shape[1:])


def _gather_each(meeting: Meeting, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for output, part in pairs:
        output.copy_(_gathered(meeting, part))


def _sums(meeting: Meeting, parts: torch.Tensor, own: int) -> torch.Tensor:
    """The sum of all members' parts for this one, flat. parts: [members, values]."""
    summed = parts.new_empty(parts.shape[1])
    for piece in _pieces(parts.shape[1], len(parts) * parts.itemsize):
        summed[piece] = sum_in_order([theirs[own] for theirs in _meet(meeting, parts[:, piece])])
    return summed


def _meet(meeting: Meeting, values: torch.Tensor) -> list[torch.Tensor]:
    """The values of all members; to be read before the next meeting."""
    _bring(meeting, values)
    return _brought(meeting, values)


def _bring(meeting: Meeting, values: torch.Tensor) -> None:
    _tensor(meeting.slot, values).copy_(values)
    meeting.arrive()


def _brought(meeting: Meeting, like: torch.Tensor) -> list[torch.Tensor]:
    meeting.wait()
    return [_tensor(meeting.written(member), like) for member in meeting.members]


def _tensor(memory: memoryview, like: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and dtype of `like`, which is not empty, at the beginning of the memory."""
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)


def _whole(size_bytes: int) -> int:
    """Rounded up, so that each tensor in a slot is aligned for any dtype."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _pieces(count: int, item_bytes: int) -> Iterator[slice]:
    """Parts of `count` items that fit a slot."""
    most = TENSOR_SLOT_BYTES // item_bytes
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))
