"""The seam between transfers and UCX: tagged messages to worker addresses. `ucx.UcxTransport` is the real one."""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message that a peer sent. Beyond a few KiB only its envelope is here: the bytes wait with the sender."""

    tag: int
    size_bytes: int
    handle: Any


class Transmission(Protocol):
    """One message on its way. It keeps its buffer alive; the buffer is the transport's until it is completed."""

    @property
    def completed(self) -> bool: ...

    def error(self) -> str | None:
        """Of a completed one: what went wrong."""
        ...


class Transport(Protocol):
    """Used by the transfer thread only. Sends to a peer that is gone complete with an error."""

    # Worker address: where others send to.
    address: bytes

    def send(self, address: bytes, tag: int, buffer: Any) -> Transmission: ...

    def next_arrival(self) -> Arrival | None:
        """Each message is returned once, then owed `receive` or `discard`."""
        ...

    def receive(self, arrival: Arrival, buffer: Any) -> Transmission:
        """`buffer` has the arrival's size."""
        ...

    def discard(self, arrival: Arrival) -> None:
        """Let the sender go on; no byte is kept."""
        ...

    def is_reachable(self, address: bytes) -> bool:
        """False once the peer is known to be gone."""
        ...

    def carrier(self, address: bytes) -> str | None:
        """Name of the UCX transport that carries segments there, e.g. "tcp"; None until the first message arrived."""
        ...

    def hang_up(self, address: bytes) -> None:
        """Close the connection: every transmission to that peer ends, with an error."""
        ...
