"""Clients that have closed their sending side only: they still read (RFC 9293, section 3.6)."""

import asyncio
import socket
from collections.abc import Callable

# A client must skip a 1xx that it does not expect (RFC 9110, section 15.2), and all know this one. If the client is
# gone, its system answers with a reset.
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
FIRST_LOOK_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
# linux/tcp_states.h
_TCP_CLOSE = 7


def tells_states() -> bool:
    """Whether this system says in which state a connection is."""
    return hasattr(socket, "TCP_INFO")


class HalfClosed:
    """Looks whether the client is still there, from construction until `stop`. Its end of data alone does not say: a
    client that has left sends the same.
    """

    def __init__(self, transport: asyncio.Transport, gives_up: Callable[[], bool]) -> None:
        """gives_up: asked at each look whether to close the connection although the client may still read."""
        self._transport, self._gives_up = transport, gives_up
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._pause_seconds = FIRST_LOOK_SECONDS
        self._wait()

    def stop(self) -> None:
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._pause_seconds, self._look)

    def _look(self) -> None:
        # Nothing is read any more, so that the event loop would notice a reset only at a write.
        if self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE or self._gives_up():
            self._transport.abort()
            return
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)
        self._wait()
