"""Counts by name that any thread may add to and read."""

import threading
from collections.abc import Mapping


class Tally:
    """`counts` is immutable once published: each `add` replaces it by another mapping."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """The counts up to now."""
        return self._counts

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts = {**self._counts, name: self._counts.get(name, 0) + count}
