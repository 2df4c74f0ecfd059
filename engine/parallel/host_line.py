"""Records between the first ranks of a worker's hosts, which their services carry."""

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from mesh.errors import RankLost

# Before each record: which host it is of, and its length.
HEADER = struct.Struct("<HI")


class HostLine:
    """One host's end. All exchange a record at a time; a thread reads what others send meanwhile."""

    def __init__(
        self, connection: socket.socket, host: int, hosts: int, arrived: Callable[[], None], limit_seconds: float
    ) -> None:
        """connection: a stream that takes what this host writes to all others, and brings what they write.

        arrived: called in the thread when a record has arrived; limit_seconds: of each wait for the others.
        """
        connection.setblocking(True)
        self._connection = connection
        self._host = host
        self._arrived = arrived
        self._limit_seconds = limit_seconds
        # The records of each other host, in order; no host is more than one record ahead of another.
        self._records: dict[int, deque[bytes]] = {other: deque() for other in range(hosts) if other != host}
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._read, name="host line", daemon=True).start()

    @property
    def due(self) -> bool:
        """Whether another host waits for this one's record."""
        return any(self._records.values())

    def exchange(self, record: bytes) -> list[bytes]:
        """Send this host's record; return those of the others, in their order. Raises RankLost."""
        try:
            self._connection.sendall(HEADER.pack(self._host, len(record)) + record)
        except OSError as error:
            raise RankLost("the connection to the worker's other hosts has ended") from error
        deadline = time.monotonic() + self._limit_seconds
        with self._changed:
            while missing := [str(host) for host, records in self._records.items() if not records]:
                if self._closed:
                    raise RankLost("the connection to the worker's other hosts has ended")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise RankLost(f"host {', '.join(missing)} has not answered for {self._limit_seconds:g} s")
            return [records.popleft() for records in self._records.values()]

    def close(self) -> None:
        # Ends the thread's read.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with self._connection, suppress(OSError), self._connection.makefile("rb") as incoming:
            while len(header := incoming.read(HEADER.size)) == HEADER.size:
                host, length = HEADER.unpack(header)
                record = incoming.read(length)
                with self._changed:
                    self._records[host].append(record)
                    self._changed.notify()
                self._arrived()
        with self._changed:
            self._closed = True
            self._changed.notify()
