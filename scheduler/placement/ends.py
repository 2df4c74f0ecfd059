"""The latest time at which each request placed on a rank ends."""

from bisect import bisect_left, insort

from mesh.domain.placement import PlacementKey


class Ends:
    """Ends in seconds on the writer's clock. Requests that have ended must be removed."""

    def __init__(self) -> None:
        self._by_key: dict[PlacementKey, float] = {}
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, key: PlacementKey, ends_at: float) -> None:
        self.remove(key)
        self._by_key[key] = ends_at
        insort(self._ordered, ends_at)

    def remove(self, key: PlacementKey) -> bool:
        """False if it was not there."""
        ends_at = self._by_key.pop(key, None)
        if ends_at is None:
            return False
        del self._ordered[bisect_left(self._ordered, ends_at)]
        return True

    def first(self, count: int) -> list[float]:
        """The earliest ends, ascending."""
        return self._ordered[:count]

    def forget_before(self, time: float) -> None:
        """Remove the requests that must have ended before `time`."""
        if self._ordered and self._ordered[0] < time:
            self._by_key = {key: ends_at for key, ends_at in self._by_key.items() if ends_at >= time}
            self._ordered = sorted(self._by_key.values())
