"""Bounds what the bodies of all connections take together while they arrive."""

from typing import Protocol


class BodyReader(Protocol):
    def give_up_body(self) -> None:
        """Read no more of the request, and forget what was read."""
        ...


class ArrivingBodies:
    """While they have more than `most_bytes`, the largest is given up, so clients with small ones notice nothing."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._sizes: dict[BodyReader, int] = {}

    def add(self, reader: BodyReader, size_bytes: int) -> None:
        """A piece of the reader's body has arrived."""
        self._sizes[reader] = self._sizes.get(reader, 0) + size_bytes
        self._bytes += size_bytes
        while self._bytes > self._most_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self.forget(largest)
            largest.give_up_body()

    def forget(self, reader: BodyReader) -> None:
        """The reader's body is whole, or will never be."""
        self._bytes -= self._sizes.pop(reader, 0)
