"""Warns of KV that goes over TCP and never leaves the host."""

import logging
from collections.abc import Iterable

_log = logging.getLogger("deepmesh.worker")


class LocalTcpWarning:
    """One line for each container or pod that sends so."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def give(self, senders: Iterable[str]) -> None:
        """Log those that were not named before. Their names may be of any characters."""
        for sender in senders:
            if sender not in self._named:
                self._named.add(sender)
                _log.warning(
                    "KV from %r, on this host, comes over TCP: for cuda_ipc or shared memory, both must share their"
                    " IPC and PID namespaces and /dev/shm, and see each other's GPUs (docs/kv-transfer.md)",
                    sender,
                )
