"""The seam between transfers and UCX: tagged messages to worker addresses. `ucx.UcxTransport` is the real one."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message from a peer. Beyond a few KiB only its envelope is here: the bytes wait with the sender."""

    tag: int
    size_bytes: int
    handle: Any


class Transmission(Protocol):
    """One message on its way. It keeps its buffer alive, which the transport uses until it is completed."""

    @property
    def completed(self) -> bool: ...

    def error(self) -> str | None:
        """What went wrong; None if nothing did. Only once it is completed."""
        ...


class Transport(Protocol):
    """Used by the transfer thread only. A send to a peer that is gone completes with an error."""

    # Worker address: where others send to.
    address: bytes

    def send(self, address: bytes, tag: int, buffer: Any) -> Transmission: ...

    def next_arrival(self) -> Arrival | None:
        """Each message is returned once; the caller then calls `receive` or `discard` for it."""
        ...

    def receive(self, arrival: Arrival, buffer: Any) -> Transmission:
        """`buffer` is as long as the message."""
        ...

    def discard(self, arrival: Arrival) -> None:
        """Drop the message, so that the sender can go on."""
        ...

    def is_reachable(self, address: bytes) -> bool:
        """False once the peer is known to be gone."""
        ...

    def transport_name(self, address: bytes) -> str | None:
        """Name of the UCX transport that carries segments there, e.g. "tcp"; None until the first message arrived."""
        ...

    def disconnect(self, address: bytes) -> None:
        """Close the connection: every transmission to that peer ends, with an error."""
        ...
