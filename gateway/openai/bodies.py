"""Bounds what the bodies of all connections take together while they arrive."""

from typing import Protocol


class BodyReader(Protocol):
    def give_up_body(self) -> None:
        """Read no more of the request, and forget what was read."""
        ...


class ArrivingBodies:
    """While they have more than `most_bytes`, the largest is given up, so clients with small ones notice nothing. One
    of more than `body_bytes` counts no more: it will be refused, and what arrives of it is forgotten.
    """

    def __init__(self, most_bytes: int, body_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._body_bytes = body_bytes
        self._bytes = 0
        # What has arrived of each body, whether it counts or not.
        self._sizes: dict[BodyReader, int] = {}

    def add(self, reader: BodyReader, size_bytes: int) -> None:
        """A piece of the reader's body has arrived."""
        before = self._sizes.get(reader, 0)
        self._sizes[reader] = size = before + size_bytes
        self._bytes += self._held(size) - self._held(before)
        while self._bytes > self._most_bytes:
            largest = max(self._sizes, key=lambda each: self._held(self._sizes[each]))
            self.forget(largest)
            largest.give_up_body()

    def forget(self, reader: BodyReader) -> None:
        """The reader's body is whole, or will never be."""
        self._bytes -= self._held(self._sizes.pop(reader, 0))

    def _held(self, size_bytes: int) -> int:
        return size_bytes if size_bytes <= self._body_bytes else 0
