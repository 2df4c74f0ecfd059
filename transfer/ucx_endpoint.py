"""One peer of a UCX worker: its connection, the requests on it, and the transport that UCX chose for it."""

import ctypes
import re
from collections.abc import Iterator
from typing import Any


class UcxRequest:
    """A `Transmission` over UCX."""

    def __init__(self, request: Any, buffer: Any, error_class: type[Exception]) -> None:
        self._request = request
        self._error_class = error_class
        # UCX does not keep the buffer alive.
        self._buffer = buffer

    @property
    def completed(self) -> bool:
        completed: bool = self._request.completed
        return completed

    def error(self) -> str | None:
        try:
            self._request.check_error()
        except self._error_class as error:
            return str(error)
        return None


class UcxSend(UcxRequest):
    """A message that can be sent again, with the same tag, to the same peer over another connection."""

    def __init__(
        self, endpoint: "UcxEndpoint", tag: Any, array: Any, buffer: Any, error_class: type[Exception]
    ) -> None:
        super().__init__(endpoint.handle.tag_send(array, tag), buffer, error_class)
        self._tag = tag
        self._array = array
        endpoint.add(self)

    def send_again(self, endpoint: "UcxEndpoint") -> None:
        self._request = endpoint.handle.tag_send(self._array, self._tag)
        endpoint.add(self)


class UcxEndpoint:
    def __init__(self, handle: Any, attempts_left: int) -> None:
        """A connection in progress; attempts_left: how often it may be tried again."""
        self.handle = handle
        self.attempts_left = attempts_left
        # Until one of these has arrived, UCX may not have chosen a transport.
        self.first_requests: list[UcxSend] = []
        self._transport_name: str | None = None

    @property
    def alive(self) -> bool:
        alive: bool = self.handle.alive
        return alive

    @property
    def connected(self) -> bool:
        """Whether any message has arrived at the peer."""
        if self._transport_name is not None:
            return True
        return any(request.completed and request.error() is None for request in self.first_requests)

    def add(self, request: UcxSend) -> None:
        """Note a request that was sent to the peer."""
        if self._transport_name is None:
            self.first_requests.append(request)

    def transport_name(self, from_host: bool) -> str | None:
        """See `transport.Transport`. The same for all segments to this peer."""
        if self._transport_name is None and self.alive and any(request.completed for request in self.first_requests):
            self._transport_name = transport_in(_describe_endpoint(self.handle.handle), from_host)
            self.first_requests = []
        return self._transport_name


def transport_in(description: str, from_host: bool) -> str:
    """The transport that UCX chose for its largest tagged messages, read from `ucp_ep_print_info`'s tables. A process
    with a GPU has tables for both kinds of memory.

    A row is `| 8K..inf | rendezvous fragmented copy-in copy-out | sysv/memory |`, under a heading that names the
    operation and the kind of memory. Several lanes are joined: "cma+tcp".
    """
    chosen: dict[bool, str] = {}
    for heading, row in _largest_messages(description):
        names = dict.fromkeys(re.findall(r"(\w+)/", row.rsplit("|", 2)[1]))
        chosen["host memory" in heading] = "+".join(names)
    return chosen.get(from_host) or chosen.get(not from_host) or "unknown"


def _largest_messages(description: str) -> Iterator[tuple[str, str]]:
    heading = ""
    for line in description.splitlines():
        if "ucp_" in line and "tagged message" in line:
            heading = line
        elif "..inf |" in line and heading:
            yield heading, line


def _describe_endpoint(handle: int) -> str:
    libc, libucp = ctypes.CDLL(None), ctypes.CDLL("libucp.so.0")
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    libc.open_memstream.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libucp.ucp_ep_print_info(ctypes.c_void_p(handle), stream)
    libc.fclose(stream)
    described = (text.value or b"").decode(errors="replace")
    libc.free(text)
    return described
