"""The other ranks of a worker, on the same host: how one sleeps until another needs it, and where it meets them."""

import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from engine.parallel.group_memory import HEADER_BYTES, GroupMemory, create_memory
from engine.parallel.layout import Group, Place
from engine.parallel.meeting import LIMIT_SECONDS, Meeting, create_meeting, region_bytes
from mesh.event_fd import EventFd

# A proposal for a step, with room for more fields.
STEP_SLOT_BYTES = 4096
# Larger tensors are exchanged in pieces.
TENSOR_SLOT_BYTES = 4 << 20
# The meetings in the memory, in order: of steps, then one of each group that exchanges tensors.
_GROUPS = (Group.WORLD, Group.TP)
_SLOT_BYTES = (STEP_SLOT_BYTES, *(TENSOR_SLOT_BYTES for _ in _GROUPS))


@dataclass(frozen=True, slots=True)
class GroupDescriptors:
    """What a service makes for the ranks of a worker, and each of them inherits."""

    memory: int
    # By rank: of the event fd that wakes it.
    wakeups: Sequence[int]

    @classmethod
    def create(cls, world: int) -> Self:
        """Raises OSError, and leaves none then. `close` them when the ranks have started."""
        with ExitStack() as undo:
            *offsets, size = _offsets(world)
            memory = create_memory(size)
            undo.callback(os.close, memory)
            with mmap.mmap(memory, size) as mapped:
                for offset in offsets:
                    create_meeting(mapped, offset, world)
            wakeups = []
            for _ in range(world):
                wakeups.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
                undo.callback(os.close, wakeups[-1])
            undo.pop_all()
        return cls(memory, wakeups)

    def close(self) -> None:
        for descriptor in (self.memory, *self.wakeups):
            os.close(descriptor)


class Peers:
    """One rank's end of what the ranks share.

    Attributes:
        place: this rank's.
        steps: where all agree on the next step.
        wakeup: is set when another rank needs this one, which may sleep until then.
    """

    def __init__(self, place: Place, descriptors: GroupDescriptors, limit_seconds: float = LIMIT_SECONDS) -> None:
        """limit_seconds: of each wait for another rank."""
        self.place = place
        world = place.layout.world
        self._memory = GroupMemory(descriptors.memory, place.rank)
        self._events = [EventFd(descriptor) for descriptor in descriptors.wakeups]
        self.wakeup = self._events[place.rank]
        everybody, *offsets, _ = _offsets(world)
        self.steps = Meeting(self._memory, everybody, world, place.rank, range(world), STEP_SLOT_BYTES, limit_seconds)
        self._tensors = {
            group: Meeting(
                self._memory, offset, world, place.rank, place.members(group), TENSOR_SLOT_BYTES, limit_seconds
            )
            for group, offset in zip(_GROUPS, offsets, strict=True)
        }

    def tensors(self, group: Group) -> Meeting:
        """Where the ranks of a group exchange tensors."""
        return self._tensors[group]

    def wake(self) -> None:
        """Wake the others, if they sleep."""
        for rank, event in enumerate(self._events):
            if rank != self.place.rank:
                event.set()

    def close(self) -> None:
        """Leave: nobody waits for this rank any more."""
        self._memory.close()


def _offsets(world: int) -> list[int]:
    """Where each meeting begins, and the size of the memory."""
    return list(accumulate((region_bytes(world, each) for each in _SLOT_BYTES), initial=HEADER_BYTES))
