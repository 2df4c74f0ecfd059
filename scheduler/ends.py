"""When the requests that were placed on a rank end at the latest."""

from bisect import bisect_left, insort

# A generation, and the number of the attempt.
PlacementKey = tuple[str, int]


class Ends:
    """Seconds, by the clock of who writes them; those of requests that have ended are taken out."""

    def __init__(self) -> None:
        self._by_key: dict[PlacementKey, float] = {}
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, key: PlacementKey, ends_at: float) -> None:
        self.remove(key)
        self._by_key[key] = ends_at
        insort(self._ordered, ends_at)

    def remove(self, key: PlacementKey) -> None:
        ends_at = self._by_key.pop(key, None)
        if ends_at is not None:
            del self._ordered[bisect_left(self._ordered, ends_at)]

    def first(self, count: int) -> list[float]:
        """The earliest, ascending."""
        return self._ordered[:count]

    def forget_before(self, time: float) -> None:
        """Take out those that must have ended."""
        if self._ordered and self._ordered[0] < time:
            self._by_key = {key: ends_at for key, ends_at in self._by_key.items() if ends_at >= time}
            self._ordered = sorted(self._by_key.values())
