"""Warns of KV that never leaves the host, and yet goes over TCP or from GPU to GPU through host memory."""

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
                    "KV from %r, on this host, comes over TCP or through host memory: GPUs exchange it by cuda_ipc if"
                    " both processes share a PID namespace, and host memory is shared if they share IPC namespace and"
                    " network (docs/kv-transfer.md)",
                    sender,
                )
