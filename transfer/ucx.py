"""UCX as `Transport`: one context and one worker, progressed by the thread that uses it."""

import ctypes
import os
import re
from collections.abc import Iterator
from typing import Any

from mesh.errors import ConfigError
from transfer.transport import Arrival, Transmission

_SETTINGS = {
    # Measured on loopback: carries four times as much as UCX's own sizes.
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
    # Without it shared memory is silently dropped, as endpoints have error handling.
    "MM_ERROR_HANDLING": "y",
    # How soon a sender that was killed is noticed over shared memory; UCX's own 20 s would keep its slots that long.
    "KEEPALIVE_INTERVAL": "1s",
}
_CLOSE_PERIOD_NS = 10_000_000


def ucx_settings(transports: str | None) -> dict[str, str]:
    """What the context is told beside the environment: a user's own UCX_* variables stay in force."""
    settings = dict(_SETTINGS)
    if transports is not None:
        settings["TLS"] = transports
    return {name: value for name, value in settings.items() if f"UCX_{name}" not in os.environ}


def check_carries_gpu_memory(transports: str | None) -> None:
    """Raises ConfigError where these transports cannot read a GPU's memory: UCX would take it for the host's."""
    chosen = os.environ.get("UCX_TLS", transports) or "all"
    names = set(chosen.removeprefix("^").split(","))
    reaching = names & {"cuda_copy", "cuda", "all"}
    if bool(reaching) == chosen.startswith("^"):
        raise ConfigError(
            f"KV on a GPU cannot be moved with the transports {chosen!r}: add cuda_copy, and cuda_ipc for GPUs of one"
            " host, or leave transfer.transports out"
        )


class UcxTransport:
    """Messages are found by probing for any tag, so that no receive is ever posted that might never be matched."""

    def __init__(self, transports: str | None) -> None:
        """Raises ConfigError where ucxx is missing, or UCX cannot be set up so."""
        self._ucx, self._array = _import_ucxx()
        try:
            features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
            self._worker = self._ucx.UCXWorker(self._ucx.UCXContext(ucx_settings(transports), features))
            self._worker.init_blocking_progress_mode()
        except self._ucx.UCXError as error:
            raise ConfigError(f"UCX does not start with transfer.transports={transports!r}: {error}") from error
        self.address: bytes = self._worker.address.tobytes()
        self._any_tag, self._any_mask = self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0)
        self._endpoints: dict[bytes, _Endpoint] = {}
        # Receives into nothing, until UCX is done with them.
        self._discarded: list[_Request] = []

    def fileno(self) -> int:
        """Readable when `progress` has something to do, after `arm` returned True."""
        descriptor: int = self._worker.epoll_file_descriptor
        return descriptor

    def arm(self) -> bool:
        """False: there is something to progress already."""
        armed: bool = self._worker.arm()
        return armed

    def progress(self) -> None:
        self._worker.progress()
        if self._discarded:
            self._discarded = [request for request in self._discarded if not request.completed]

    def send(self, address: bytes, tag: int, buffer: Any) -> Transmission:
        endpoint = self._endpoints.get(address)
        if endpoint is None or not endpoint.alive:
            try:
                endpoint = self._endpoints[address] = _Endpoint(self._connect(address))
            except self._ucx.UCXError as error:
                return _Unsent(str(error))
        request = self._request(endpoint.handle.tag_send(self._array(buffer), self._ucx.UCXXTag(tag)), buffer)
        endpoint.note(request)
        return request

    def next_arrival(self) -> Arrival | None:
        probe = self._worker.tag_probe(self._any_tag, self._any_mask, True)
        return Arrival(probe.sender_tag.value, probe.length, probe) if probe.matched else None

    def receive(self, arrival: Arrival, buffer: Any) -> "_Request":
        return self._request(self._worker.tag_recv_with_handle(self._array(buffer), arrival.handle), buffer)

    def discard(self, arrival: Arrival) -> None:
        # Truncation to nothing ends the message on both sides, and frees the sender's buffer.
        self._discarded.append(self.receive(arrival, bytearray()))

    def is_reachable(self, address: bytes) -> bool:
        endpoint = self._endpoints.get(address)
        return endpoint is None or endpoint.alive

    def carrier(self, address: bytes) -> str | None:
        endpoint = self._endpoints.get(address)
        return endpoint.carrier() if endpoint is not None else None

    def hang_up(self, address: bytes) -> None:
        endpoint = self._endpoints.pop(address, None)
        # UCX has closed the endpoint of a dead peer itself; over TCP, closing it again crashes the process.
        if endpoint is not None and endpoint.alive:
            # The other close flushes first, and a frozen peer never lets it end; this one cancels, within 0.1 ms.
            endpoint.handle.close_blocking(_CLOSE_PERIOD_NS, 1)

    def sweep(self) -> None:
        """Forget connections to peers that are gone."""
        for address in [address for address, endpoint in self._endpoints.items() if not endpoint.alive]:
            self.hang_up(address)

    def close(self) -> None:
        """Drop every connection, and what is under way on it."""
        for address in list(self._endpoints):
            self.hang_up(address)
        self._worker.progress()
        self._worker.cancel_inflight_requests()
        self._worker.progress()

    def _request(self, request: Any, buffer: Any) -> "_Request":
        return _Request(request, buffer, self._ucx.UCXError)

    def _connect(self, address: bytes) -> Any:
        peer = self._ucx.UCXAddress.create_from_buffer(address)
        return self._worker.create_endpoint_from_worker_address(peer, True)


class _Request:
    def __init__(self, request: Any, buffer: Any, error_class: type[Exception]) -> None:
        self._request = request
        self._error_class = error_class
        # UCX does not keep it alive.
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


class _Unsent:
    """A message to a peer that cannot be reached at all."""

    completed = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def error(self) -> str | None:
        return self._reason


class _Endpoint:
    def __init__(self, handle: Any) -> None:
        self.handle = handle
        # Until one of them has arrived, UCX may not have settled on a transport.
        self._first: list[_Request] = []
        self._carrier: str | None = None

    @property
    def alive(self) -> bool:
        alive: bool = self.handle.alive
        return alive

    def note(self, request: _Request) -> None:
        if self._carrier is None:
            self._first.append(request)

    def carrier(self) -> str | None:
        if self._carrier is None and self.alive and any(request.completed for request in self._first):
            self._carrier = carrier_in(_describe_endpoint(self.handle.handle))
            self._first = []
        return self._carrier


def carrier_in(description: str) -> str:
    """The transport that UCX chose for its largest tagged messages, from `ucp_ep_print_info`'s tables.

    A row is `| 8K..inf | rendezvous fragmented copy-in copy-out | sysv/memory |`, under a heading that names the
    operation and the kind of memory. Several lanes are joined: "cma+tcp".
    """
    chosen: dict[bool, str] = {}
    for heading, row in _largest_messages(description):
        names = dict.fromkeys(re.findall(r"(\w+)/", row.rsplit("|", 2)[1]))
        chosen["host memory" in heading] = "+".join(names)
    # With GPU memory there are tables of both kinds, and segments lie on the GPU.
    return chosen.get(False) or chosen.get(True) or "unknown"


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


def _import_ucxx() -> tuple[Any, Any]:
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise ConfigError("KV transfers need UCX: install ucxx-cu13 (Linux only), or run without --prefill") from error
    return libucxx, Array
