"""What a worker's service leaves to the program that takes its place: its ranks, which go on, and its settings.

The two are one process: exec keeps children and the descriptors that are marked for it.
"""

import os
from collections.abc import Mapping
from typing import Self

import msgspec

from mesh.errors import ConfigError

# The descriptor of a Handover, for the next program of this process alone.
HANDOVER_VARIABLE = "DEEPMESH_HANDOVER"


class RankHandle(msgspec.Struct, frozen=True):
    """A released rank: its process, and the descriptors of its socket and of its pulse."""

    process_id: int
    socket: int
    pulse: int


class Handover(msgspec.Struct, frozen=True):
    # None if the next program loads its own.
    ranks: list[RankHandle]
    # KEY=VALUE of the role that the worker had, to go back to.
    former_settings: list[str]
    # When the worker had drained, by the machine's monotonic clock.
    drained_at: float

    @classmethod
    def take(cls) -> Self | None:
        """What the program before this one left, once; None if there was none. Raises ConfigError."""
        text = os.environ.pop(HANDOVER_VARIABLE, None)
        if text is None:
            return None
        try:
            with open(int(text), "rb") as file:
                return msgspec.msgpack.decode(file.read(), type=cls)
        except (ValueError, OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{HANDOVER_VARIABLE} is for a worker that changes its role: unset it") from error

    def leave(self) -> Mapping[str, str]:
        """The variables with which the next program finds it."""
        descriptor = os.memfd_create("handover")
        os.write(descriptor, msgspec.msgpack.encode(self))
        os.lseek(descriptor, 0, os.SEEK_SET)
        for each in (descriptor, *(each for rank in self.ranks for each in (rank.socket, rank.pulse))):
            os.set_inheritable(each, True)
        return {HANDOVER_VARIABLE: str(descriptor)}
