"""Measures how fast fetches are, by where the store had the blocks. Pure."""

# Weight of the newest fetch in a smoothed rate.
_NEWEST = 0.2


class FetchRates:
    """Bytes per second, smoothed; None while unknown."""

    def __init__(self) -> None:
        self.memory: float | None = None
        self.disk: float | None = None

    def observe(self, blocks: int, in_memory: int, size_bytes: int, seconds: float) -> None:
        """Note a fetch of `blocks` blocks that the store had, the first `in_memory` of them in memory. size_bytes: of
        the blocks that arrived in these seconds, or of one block if none did.

        It counts for memory if all blocks were there, and for the disk if at most a quarter was in memory. Any other
        fetch says little of either tier and is ignored.
        """
        if not blocks or seconds <= 0:
            return
        if in_memory >= blocks:
            self.memory = _smoothed(self.memory, size_bytes / seconds)
        elif 4 * in_memory <= blocks:
            self.disk = _smoothed(self.disk, size_bytes / seconds)


def _smoothed(before: float | None, rate: float) -> float:
    # Smoothed as logarithms: a disk may become a thousand times slower, and a few fetches must suffice to know.
    return rate if before is None else before * (rate / before) ** _NEWEST
