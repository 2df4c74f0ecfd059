"""Where a process runs, and whether KV from there should have come through memory."""

import os
import socket
from pathlib import Path

import msgspec

from transfer.tally import Tally

# Equal in all containers of a host, and another after each boot.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")
_TCP = "tcp"
_CUDA_IPC = "cuda_ipc"
# Copies between a GPU and host memory.
_CUDA_COPY = "cuda_copy"
# With one of these among its lanes, a connection carries its large messages within the host.
_THROUGH_MEMORY = frozenset({"cuda_ipc", "posix", "sysv", "cma", "xpmem", "knem"})
# A peer chooses its own name, so there must be an end of them.
_MOST_NAMES = 256
_LONGEST_NAME = 64


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The place of a process that leaves the choice of transports to UCX."""

    host: str
    # The name of its container or pod.
    container: str
    # Which PID namespace it is in; None if it does not tell.
    processes: int | None = None


def own_origin() -> Origin | None:
    """None if the system does not tell."""
    try:
        host = _BOOT_ID.read_text(encoding="ascii").strip()
        return Origin(host, socket.gethostname()[:_LONGEST_NAME], os.stat(_PROCESSES).st_ino)
    except OSError:
        return None


class LocalTcp:
    """Counts the bytes that came from this host over TCP, or from one GPU to another through host memory, by the
    sender's container.
    """

    def __init__(self, own: Origin | None) -> None:
        """own: None counts nothing."""
        self._own = own
        self.bytes = Tally()

    def see(self, origin: Origin | None, transport: str, size_bytes: int) -> str:
        """Count a segment, if it should have come otherwise. Returns what carried it.

        transport: as UCX names it, with several lanes joined by +. UCX names cuda_ipc also for a process of another
        PID namespace, where it then does without (1.21: the rest of the key says that the memory cannot be opened).
        """
        if origin is None or self._own is None or origin.host != self._own.host:
            return transport
        lanes = transport.split("+")
        if None not in (known := (origin.processes, self._own.processes)) and len(set(known)) > 1:
            lanes = [_CUDA_COPY if lane == _CUDA_IPC else lane for lane in lanes]
        if not _THROUGH_MEMORY.intersection(lanes) and {_TCP, _CUDA_COPY}.intersection(lanes):
            self._count(origin.container[:_LONGEST_NAME], size_bytes)
        return "+".join(lanes)

    def _count(self, name: str, size_bytes: int) -> None:
        if name in self.bytes.counts or len(self.bytes.counts) < _MOST_NAMES:
            self.bytes.add(name, size_bytes)
