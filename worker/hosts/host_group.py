"""What the service of one of a worker's hosts keeps of its ranks' group, so that they can form another: the line to
other hosts, and their memory.
"""

import os
from typing import Self

import msgspec

from engine.parallel.peers import GroupDescriptors, prepare_memory
from worker.hosts.line import Line

# How long the ranks of a host may take to leave their group when another host was lost. A rank leaves when it waits for
# others the next time, which it does in every layer.
LEAVE_SECONDS = 5.0


class GroupHandle(msgspec.Struct, frozen=True):
    """Descriptors of a group that its ranks have left, for this process's next program."""

    memory: int
    line: int


class HostGroup:
    """Made by `open` or `take`.

    Attributes:
        line: from this host's first rank to the other hosts.
    """

    def __init__(self, ranks: int, line: Line, memory: int) -> None:
        """ranks: of this host; memory: becomes this object's."""
        self.line = line
        self._ranks = ranks
        self._memory = memory

    @classmethod
    async def open(cls, ranks: int) -> tuple[Self, GroupDescriptors]:
        """A group, and what its ranks inherit; the caller must close that."""
        line, theirs = await Line.open()
        descriptors = GroupDescriptors.create(ranks, theirs)
        return cls(ranks, line, os.dup(descriptors.memory)), descriptors

    @classmethod
    async def take(cls, ranks: int, handle: GroupHandle) -> Self:
        """The group that this process's former program has left."""
        for descriptor in (handle.memory, handle.line):
            os.set_inheritable(descriptor, False)
        return cls(ranks, await Line.take(handle.line), handle.memory)

    def renew(self) -> None:
        """Make it ready for the next group of the same ranks, all of which have left this one."""
        prepare_memory(self._memory, self._ranks)
        self.line.renew()

    def leave(self) -> GroupHandle:
        """A handle for `take`; this object may be closed afterwards."""
        return GroupHandle(os.dup(self._memory), self.line.leave())

    def close(self) -> None:
        self.line.close()
        os.close(self._memory)
