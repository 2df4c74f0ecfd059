"""What a worker's service leaves to the program that replaces it: its ranks, which keep running, and its settings.

Both programs are the same process: exec keeps child processes and the descriptors marked as inheritable.
"""

import logging
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import msgspec

from mesh.errors import ConfigError
from worker.hosts.comparison import own_version
from worker.hosts.host_group import GroupHandle

# Number of the descriptor that holds a Handover; only for the next program of this process.
HANDOVER_VARIABLE = "DEEPMESH_HANDOVER"

_log = logging.getLogger("deepmesh.worker")


class RankHandle(msgspec.Struct, frozen=True):
    """A released rank: its process id, and the descriptors of its socket and of its pulse."""

    process_id: int
    socket: int
    pulse: int


class KeptRanks(msgspec.Struct, frozen=True):
    """Ranks that keep what they have loaded. group: what they share, if the worker has other hosts."""

    ranks: list[RankHandle]
    group: GroupHandle | None = None

    @property
    def descriptors(self) -> list[int]:
        group = [] if self.group is None else [self.group.memory, self.group.line]
        return [*group, *(each for rank in self.ranks for each in (rank.socket, rank.pulse))]

    def end(self) -> None:
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.process_id, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(rank.process_id, 0)
        for descriptor in self.descriptors:
            os.close(descriptor)


class Handover(msgspec.Struct, frozen=True):
    # None if the next program starts its own ranks.
    kept: KeptRanks | None
    # KEY=VALUE settings of the worker's former role, to which it may return.
    former_settings: list[str]
    # When the worker had drained, on the machine's monotonic clock.
    drained_at: float
    # The version of deepmesh that the former program had, and so its ranks.
    version: str = ""

    @classmethod
    def take(cls) -> Self | None:
        """What the previous program left; None if there was none. Works only once. Ranks of another version of
        deepmesh, which was replaced while they ran, are ended. Raises ConfigError.
        """
        text = os.environ.pop(HANDOVER_VARIABLE, None)
        if text is None:
            return None
        try:
            with open(int(text), "rb") as file:
                left = msgspec.msgpack.decode(file.read(), type=cls)
        except (ValueError, OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{HANDOVER_VARIABLE} is for a worker that changes its role: unset it") from error
        if left.kept is None or left.version == own_version():
            return left
        _log.warning(
            "the ranks are of another version of deepmesh: new ones start", extra={"fields": {"theirs": left.version}}
        )
        left.kept.end()
        return msgspec.structs.replace(left, kept=None)

    def leave(self) -> Mapping[str, str]:
        """The environment variables by which the next program finds it."""
        descriptor = os.memfd_create("handover")
        os.write(descriptor, msgspec.msgpack.encode(msgspec.structs.replace(self, version=own_version())))
        os.lseek(descriptor, 0, os.SEEK_SET)
        for each in (descriptor, *([] if self.kept is None else self.kept.descriptors)):
            os.set_inheritable(each, True)
        return {HANDOVER_VARIABLE: str(descriptor)}
