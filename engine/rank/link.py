"""The rank's end of the socket to its service, over which ranks on several hosts also find each other."""

import select
import socket
from contextlib import suppress

import msgspec

from engine.protocol.frames import RECEIVE_BYTES, FrameDecoder, FrameEncoder
from engine.protocol.messages import Found, LookUp, Publish, Release, ToRank
from mesh.errors import EngineFailed, RankLost
from mesh.event_fd import EventFd

# While more bytes wait for the service to read them, the engine pauses and still receives: a slow service neither fills
# our memory, nor waits for us to read while we wait for it.
MAX_OUTGOING_BYTES = 4 * 1024 * 1024


class RankLink:
    """Sending never blocks; receiving blocks only when asked to, until a message arrives or `wakeup` is set."""

    def __init__(self, connection: socket.socket, wakeup: EventFd) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._wakeup = wakeup
        self._poll = select.poll()
        self._poll.register(wakeup, select.POLLIN)
        self._encoder = FrameEncoder()
        self._decoder: FrameDecoder[ToRank] = FrameDecoder(ToRank)
        self._outgoing = bytearray()
        # Whether the service has closed its end, or died.
        self.closed = False

    def send(self, message: msgspec.Struct) -> None:
        self._outgoing += self._encoder.encode(message)
        self._flush()

    def receive(self, wait: bool, most_seconds: float | None = None) -> list[ToRank]:
        """All messages that have arrived. Empty once closed.

        With `wait`, sleep until there is one or `wakeup` is set, and no longer than `most_seconds`. Sleeps regardless
        of `wait` while more than MAX_OUTGOING_BYTES are unread.
        """
        messages: list[ToRank] = []
        while not self.closed:
            self._flush()
            messages += self._drain()
            wait = wait and not self._wakeup.clear()
            stalled = len(self._outgoing) > MAX_OUTGOING_BYTES
            if not stalled and (messages or not wait):
                break
            self._sleep(most_seconds)
            wait = wait and most_seconds is None
        return messages

    def flush(self) -> None:
        """Sleep until everything is sent, or the service has gone."""
        while self._outgoing and not self.closed:
            self._sleep()
            self._flush()

    def _sleep(self, most_seconds: float | None = None) -> None:
        events = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        self._poll.register(self._connection, events)
        self._poll.poll(None if most_seconds is None else most_seconds * 1000)

    def _drain(self) -> list[ToRank]:
        messages: list[ToRank] = []
        try:
            while data := self._connection.recv(RECEIVE_BYTES):
                messages += self._decoder.feed(data)
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionError:
            self.closed = True
        return messages

    def _flush(self) -> None:
        try:
            with suppress(BlockingIOError):
                while self._outgoing:
                    del self._outgoing[: self._connection.send(self._outgoing)]
        except ConnectionError:
            self.closed = True


class Rendezvous:
    """One rank's way to all ranks of its worker. Nothing else may receive from the link meanwhile."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def publish(self, key: str, value: bytes) -> None:
        self._link.send(Publish(key, value))

    def look_up(self, key: str) -> bytes:
        """What some rank publishes under the key. Raises EngineFailed if the worker ends before, RankLost if the group
        is released before all have met.
        """
        self._link.send(LookUp(key))
        messages: list[ToRank] = []
        while not (messages or self._link.closed):
            messages = self._link.receive(wait=True)
        if any(isinstance(message, Release) for message in messages):
            raise RankLost("a host of the worker was lost before its ranks have met")
        if not (messages and isinstance(messages[0], Found)):
            raise EngineFailed("the worker ends before its ranks have met")
        return messages[0].value
