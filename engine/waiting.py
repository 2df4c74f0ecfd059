"""Requests that hold no blocks yet, in order of admission."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.request import Request


class WaitingQueue:
    """Ordered by arrival batch, then by tokens to compute (as estimated on entry), then by arrival."""

    def __init__(self) -> None:
        # `arrival` is unique, so the first three elements decide every comparison.
        self._entries: list[tuple[int, int, int, Request]] = []
        self._entry_by_key: dict[int, tuple[int, int, int, Request]] = {}
        # Sum of the estimates.
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, _, request in self._entries)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._entry_by_key

    def add(self, request: Request, uncached_tokens: int) -> None:
        batch, position = request.arrival
        entry = (batch, uncached_tokens, position, request)
        insort(self._entries, entry)
        self._entry_by_key[request.key] = entry
        self.tokens += uncached_tokens

    def remove(self, request: Request) -> None:
        entry = self._entry_by_key.pop(request.key)
        del self._entries[bisect_left(self._entries, entry)]
        self.tokens -= entry[1]
