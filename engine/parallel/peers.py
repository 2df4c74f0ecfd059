"""The other ranks of a worker on the same host: how one sleeps until another needs it, and where it meets them."""

import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Self

from engine.parallel.group_memory import HEADER_BYTES, GroupMemory, create_memory
from engine.parallel.host_line import HostLine
from engine.parallel.layout import Group, Place
from engine.parallel.lockstep import Lockstep, create_lockstep, lockstep_bytes
from engine.parallel.meeting import LIMIT_SECONDS, Meeting, create_meeting, region_bytes
from mesh.event_fd import EventFd

# Larger tensors are exchanged in pieces.
TENSOR_SLOT_BYTES = 4 << 20
# Stands for a missing descriptor in arguments.
_NONE = "-"
# In the memory each has a meeting, after the lockstep.
_GROUPS = (Group.WORLD, Group.TP)


@dataclass(frozen=True, slots=True)
class GroupDescriptors:
    """What a service makes for the ranks of a worker on its host, and each of them inherits."""

    memory: int
    # By rank of this host: of the event fd that wakes it.
    wakeups: Sequence[int]
    # The socket that leads to the other hosts, if there are any. The first rank uses it.
    line: int | None = None

    @classmethod
    def create(cls, world: int, line: int | None = None) -> Self:
        """world: how many ranks the host has; line: becomes this object's.

        If it raises OSError, no descriptor is left open. `close` them when the ranks have started.
        """
        with ExitStack() as undo:
            memory = create_memory(_offsets(world)[-1])
            undo.callback(os.close, memory)
            prepare_memory(memory, world)
            wakeups = []
            for _ in range(world):
                wakeups.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
                undo.callback(os.close, wakeups[-1])
            undo.pop_all()
        return cls(memory, wakeups, line)

    @classmethod
    def of_arguments(cls, arguments: Sequence[str]) -> Self | None:
        """What the property `arguments` gave; None if there are none."""
        if not arguments:
            return None
        memory, line, *wakeups = (None if each == _NONE else int(each) for each in arguments)
        assert memory is not None
        return cls(memory, [each for each in wakeups if each is not None], line)

    @property
    def arguments(self) -> list[str]:
        """For a rank's command line."""
        return [str(self.memory), _NONE if self.line is None else str(self.line), *map(str, self.wakeups)]

    @property
    def all(self) -> list[int]:
        return [self.memory, *self.wakeups, *([] if self.line is None else [self.line])]

    def close(self) -> None:
        for descriptor in self.all:
            os.close(descriptor)


class Peers:
    """One rank's end of what the ranks share.

    Attributes:
        in_worker: this rank's place in the worker.
        place: its place among the ranks of its host; equal to `in_worker` if there is no other host.
        steps: how all agree on the next step.
        wakeup: set when another rank needs this one, which may sleep until then.
        line: to the other hosts; None if there are none, and on all but the host's first rank.
    """

    def __init__(self, place: Place, descriptors: GroupDescriptors, limit_seconds: float = LIMIT_SECONDS) -> None:
        """place: in the worker; limit_seconds: of each wait for another rank."""
        self.in_worker, hosts = place, place.layout.hosts
        self.place = place = place.on_host
        world = place.layout.world
        self._memory = GroupMemory(descriptors.memory, place.rank)
        events = [EventFd(descriptor) for descriptor in descriptors.wakeups]
        self.wakeup = events.pop(place.rank)
        lockstep, *meetings, _ = _offsets(world)
        self.steps = Lockstep(self._memory, lockstep, world, place.rank, partial(_wake, events), limit_seconds)
        self._tensors = {
            group: Meeting(
                self._memory, offset, world, place.rank, place.members(group), TENSOR_SLOT_BYTES, limit_seconds
            )
            for group, offset in zip(_GROUPS, meetings, strict=True)
        }

        self.line: HostLine | None = None
        if hosts > 1 and place.rank == 0:
            assert descriptors.line is not None
            connection = socket.socket(fileno=os.dup(descriptors.line))
            # The host's other ranks hear of a lost host too: while this one waits for one of them, that may wait for a
            # rank of the lost host.
            self.line = HostLine(
                connection, self.in_worker.host, hosts, self.wakeup.set, self._memory.give_up, limit_seconds
            )

    @property
    def broken(self) -> bool:
        """Whether the ranks cannot go on together: one of this host has left or given up, or no record comes from other
        hosts.
        """
        if self.given_up or (self.line is not None and self.line.ended):
            return True
        return any(self._memory.has_ended(rank) for rank in range(self.place.layout.world) if rank != self.place.rank)

    def give_up(self) -> None:
        """Tell the ranks of this host that this one's device goes on without what it waits for. Any thread may call
        it, before the device does so. The end of the line tells them too.
        """
        self._memory.give_up()

    @property
    def given_up(self) -> bool:
        """Whether what comes from a rank of this host, or from this one, may be wrong: its device has given up."""
        return any(self._memory.has_given_up(rank) for rank in range(self.place.layout.world))

    def tensors(self, group: Group) -> Meeting:
        """Where the ranks of a group exchange tensors."""
        return self._tensors[group]

    def leave(self, seconds: float) -> bool:
        """Leave, so that a later group can use the same memory and line. Returns whether the service ends this group
        within `seconds`; only the host's first rank waits for that.
        """
        # First of all, since ranks that wait for this one leave only then.
        self._memory.close()
        return self.line is None or self.line.leave(seconds)

    def close(self) -> None:
        """Leave, so that no rank waits for this one."""
        if self.line is not None:
            self.line.close()
        self._memory.close()


def prepare_memory(descriptor: int, world: int) -> None:
    """Make the memory of a host's ranks ready for a group: new memory, or that of a group which all have left."""
    lockstep, *meetings, size = _offsets(world)
    # What a former group wrote is dropped.
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, size)
    with mmap.mmap(descriptor, size) as mapped:
        create_lockstep(mapped, lockstep, world)
        for offset in meetings:
            create_meeting(mapped, offset, world)


def _wake(events: Sequence[EventFd]) -> None:
    for event in events:
        event.set()


def _offsets(world: int) -> list[int]:
    """Where the lockstep and each meeting begin, and the size of the memory."""
    meetings = (region_bytes(world, TENSOR_SLOT_BYTES) for _ in _GROUPS)
    return list(accumulate((lockstep_bytes(world), *meetings), initial=HEADER_BYTES))
