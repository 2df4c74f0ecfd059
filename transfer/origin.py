"""Where a process runs, and whether KV from there should have come through memory."""

import socket
from pathlib import Path

import msgspec

from transfer.tally import Tally

# Equal in all containers of a host, and another after each boot.
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TCP = "tcp"
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


def own_origin() -> Origin | None:
    """None if the system does not tell."""
    try:
        return Origin(_BOOT_ID.read_text(encoding="ascii").strip(), socket.gethostname()[:_LONGEST_NAME])
    except OSError:
        return None


class LocalTcp:
    """Counts the bytes that came over TCP from this host, by the sender's container."""

    def __init__(self, own: Origin | None) -> None:
        """own: None counts nothing."""
        self._own = own
        self.bytes = Tally()

    def see(self, origin: Origin | None, transport: str, size_bytes: int) -> None:
        """Count a segment, if it should have come otherwise. transport: UCX's, with several lanes joined by +."""
        if origin is None or self._own is None or origin.host != self._own.host:
            return
        lanes = set(transport.split("+"))
        name = origin.container[:_LONGEST_NAME]
        counts = self.bytes.counts
        if _TCP in lanes and not lanes & _THROUGH_MEMORY and (name in counts or len(counts) < _MOST_NAMES):
            self.bytes.add(name, size_bytes)
