"""The data of server-sent events, cut from a byte stream."""


class EventSplitter:
    """Feeds on the chunks of a body as they come; an event may span chunks, and a chunk hold several events.

    Only single-line `data:` fields count, which is all that OpenAI streams use.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Payloads of the data lines that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
