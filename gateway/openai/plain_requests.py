"""Parses requests that ask to change the protocol of their connection as if they did not ask."""

from typing import Protocol

import httptools


class PlainRequests(Protocol):
    """What the parser's protocol offers in addition to httptools' callbacks."""

    def head_without_upgrade(self) -> bytes | None:
        """The head of the request that was read last without its wish; None if it is not to be read again."""


class PlainRequestParser(httptools.HttpRequestParser):
    """A server may ignore `Upgrade` (RFC 9110, section 7.8). httptools takes such a request to end with its headers, so
    a body would be lost; Java's HTTP client asks for h2c in the first request of each connection, whatever it posts.

    The request is therefore read twice: its callbacks come once for the head as it was sent, then without the wish.
    """

    def __init__(self, protocol: PlainRequests) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]
        while True:
            try:
                super().feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head = self._protocol.head_without_upgrade()
                if head is None:
                    raise
                (end,) = upgrade.args
                data = head + data[end:]
