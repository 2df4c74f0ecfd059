"""The seam between transfers and UCX: tagged messages to worker addresses. `ucx.UcxTransport` is the real one."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message from a peer. If it is larger than a few KiB, only its envelope is here, and its bytes wait with the
    sender.
    """

    tag: int
    size_bytes: int
    handle: Any


class Transmission(Protocol):
    """One message in flight. It keeps its buffer alive until the transport no longer uses it."""

    @property
    def completed(self) -> bool: ...

    def error(self) -> str | None:
        """What went wrong; None if nothing did. Call it only once the transmission has completed."""
        ...


class Transport(Protocol):
    """Used by the transfer thread only. A send to a peer that is gone completes with an error."""

    # Worker address, to which others send.
    address: bytes

    def send(self, address: bytes, tag: int, buffer: Any) -> Transmission: ...

    def next_arrival(self) -> Arrival | None:
        """The next message; None if there is none. Each is returned once, and the caller must `receive` or `discard`
        it.
        """
        ...

    def receive(self, arrival: Arrival, buffer: Any) -> Transmission:
        """Receive the message into `buffer`, which must have its length."""
        ...

    def discard(self, arrival: Arrival) -> None:
        """Drop the message, so that the sender can continue."""
        ...

    def is_reachable(self, address: bytes) -> bool:
        """False once the peer is known to be gone."""
        ...

    def transport_name(self, address: bytes, from_host: bool) -> str | None:
        """Name of the UCX transport that carries segments there, e.g. "tcp"; None until the first message has
        arrived. from_host: whether they lie in host memory, and not on a GPU.
        """
        ...

    def disconnect(self, address: bytes) -> None:
        """Close the connection: every transmission to that peer ends with an error."""
        ...
