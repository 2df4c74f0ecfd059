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
# Ends what one side writes. A later line over the same connection begins after it, so that no record is taken for one
# of another group.
END = HEADER.pack(0xFFFF, 0)


class HostLine:
    """One host's end. All exchange a record at a time; a thread reads what others send meanwhile."""

    def __init__(
        self,
        connection: socket.socket,
        host: int,
        hosts: int,
        arrived: Callable[[], None],
        over: Callable[[], None],
        limit_seconds: float,
    ) -> None:
        """connection: a stream that takes what this host writes to all others, and brings what they write.

        arrived: called in the thread when a record has arrived, or the end; over: called before that at the end;
        limit_seconds: of each wait for the others.
        """
        connection.setblocking(True)
        self._connection = connection
        self._host = host
        self._arrived = arrived
        self._over = over
        self._limit_seconds = limit_seconds
        # The records of each other host, in order; no host is more than one record ahead of another.
        self._records: dict[int, deque[bytes]] = {other: deque() for other in range(hosts) if other != host}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="host line", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether no more records arrive."""
        return self._closed

    @property
    def due(self) -> bool:
        """Whether another host waits for this one's record, or none can get it any more."""
        return self._closed or any(self._records.values())

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

    def leave(self, seconds: float) -> bool:
        """Write no more, and wait until the service ends the line too. Returns whether it has within `seconds`."""
        with suppress(OSError):
            self._connection.sendall(END)
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        self._connection.close()
        return True

    def close(self) -> None:
        # Ends the thread's read.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _read(self) -> None:
        with suppress(OSError), self._connection.makefile("rb") as incoming:
            while len(header := incoming.read(HEADER.size)) == HEADER.size:
                if header == END:
                    break
                host, length = HEADER.unpack(header)
                record = incoming.read(length)
                with self._changed:
                    self._records[host].append(record)
                    self._changed.notify()
                self._arrived()
        self._over()
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._arrived()
