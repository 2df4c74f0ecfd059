"""A transport whose messages move when the test says so."""

from dataclasses import dataclass, field
from typing import Any

from transfer.transport import Arrival


@dataclass(eq=False)
class FakeTransmission:
    buffer: Any
    address: bytes = b""
    tag: int = 0
    payload: bytes = b""
    completed: bool = False
    failure: str | None = None

    def error(self) -> str | None:
        assert self.completed
        return self.failure

    def write(self) -> None:
        """Write the payload. UCX may do so until it completes, even if the transfer has ended meanwhile."""
        assert not self.completed
        memoryview(self.buffer)[:] = self.payload

    def finish(self, failure: str | None = None) -> None:
        self.completed, self.failure = True, failure


@dataclass
class FakeTransport:
    """The handle of an arrival is its payload, which its receive then holds."""

    address: bytes = b"here"
    arrivals: list[Arrival] = field(default_factory=list)
    sends: list[FakeTransmission] = field(default_factory=list)
    receives: list[FakeTransmission] = field(default_factory=list)
    discarded: list[Arrival] = field(default_factory=list)
    disconnected: list[bytes] = field(default_factory=list)
    reachable: bool = True
    # The name that the transport gives for itself.
    name: str | None = "fake"

    def send(self, address: bytes, tag: int, buffer: Any) -> FakeTransmission:
        assert 0 <= tag < 1 << 64, "UCX has no such tag"
        self.sends.append(FakeTransmission(buffer, address, tag))
        return self.sends[-1]

    def finish_messages(self, tag: int) -> None:
        """Complete all that was sent or received with this tag."""
        for each in [*self.sends, *self.receives]:
            if each.tag == tag and not each.completed:
                if each.payload:
                    each.write()
                each.finish()

    def next_arrival(self) -> Arrival | None:
        return self.arrivals.pop(0) if self.arrivals else None

    def receive(self, arrival: Arrival, buffer: Any) -> FakeTransmission:
        assert len(buffer) == arrival.size_bytes
        self.receives.append(FakeTransmission(buffer, tag=arrival.tag, payload=arrival.handle))
        return self.receives[-1]

    def discard(self, arrival: Arrival) -> None:
        self.discarded.append(arrival)

    def is_reachable(self, address: bytes) -> bool:
        return self.reachable

    def transport_name(self, address: bytes, from_host: bool) -> str | None:
        return self.name

    def disconnect(self, address: bytes) -> None:
        self.disconnected.append(address)
        for send in self.sends:
            if send.address == address and not send.completed:
                send.finish("disconnected")
