"""Small messages over a transport: sent without waiting, delivered when all their bytes are there."""

from collections.abc import Callable
from dataclasses import dataclass

from transfer.tally import Tally
from transfer.transport import Arrival, Transmission, Transport

# Why a message was not read; a key of TransferCounters.refused.
OVERSIZED_MESSAGE = "oversized_message"


@dataclass(eq=False)
class _Receive:
    buffer: bytearray
    transmission: Transmission
    deliver: Callable[[bytes], None]


class Mailbox:
    """Delivers messages whose bytes came with their envelope in order, and larger ones when their bytes are there."""

    def __init__(self, transport: Transport, refused: Tally) -> None:
        self._transport = transport
        self._refused = refused
        # Sends whose messages UCX still reads.
        self._sends: list[Transmission] = []
        self._receives: list[_Receive] = []

    @property
    def in_flight(self) -> bool:
        return bool(self._receives)

    def send(self, address: bytes, tag: int, message: bytes) -> Transmission:
        """Send a message. If the peer is gone, the message is lost: see `Transport.is_reachable`."""
        transmission = self._transport.send(address, tag, message)
        self._sends.append(transmission)
        return transmission

    def receive(self, arrival: Arrival, max_bytes: int, deliver: Callable[[bytes], None]) -> None:
        """Call `deliver` with the message once it is complete. A message of more than `max_bytes` is refused."""
        if arrival.size_bytes > max_bytes:
            self._refused.add(OVERSIZED_MESSAGE)
            self._transport.discard(arrival)
            return
        buffer = bytearray(arrival.size_bytes)
        self._receives.append(_Receive(buffer, self._transport.receive(arrival, buffer), deliver))

    def poll(self) -> bool:
        """Deliver the messages that are complete. Returns whether there was one."""
        if self._sends:
            self._sends = [send for send in self._sends if not send.completed]
        if not self._receives:
            return False
        done = [receive for receive in self._receives if receive.transmission.completed]
        if done:
            self._receives = [receive for receive in self._receives if receive not in done]
        for receive in done:
            if receive.transmission.error() is None:
                receive.deliver(bytes(receive.buffer))
        return bool(done)
