"""The newest batches of events, in order, for all subscribers: each reads on from the number that it has reached."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from worker.events.batch import Batch, Event


class EventLog:
    """Batches are numbered from 1. Memory is bounded by the blocks that they name, however slow a subscriber is."""

    def __init__(self, kept_blocks: int, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the epoch. The newest batch is kept in any case."""
        self._kept_blocks = kept_blocks
        self._clock = clock
        self._batches: deque[Batch] = deque()
        self._blocks = 0
        self._news = asyncio.Event()
        # Number of the newest batch; 0 if there was none.
        self.last = 0

    @property
    def first(self) -> int:
        """Number of the oldest batch that is kept, or of the next one if none is."""
        return self.last + 1 - len(self._batches)

    def add(self, rank: int, events: Sequence[Event]) -> None:
        self.last += 1
        batch = Batch(self.last, self._clock(), rank, events)
        self._batches.append(batch)
        self._blocks += batch.blocks
        while self._blocks > self._kept_blocks and len(self._batches) > 1:
            self._blocks -= self._batches.popleft().blocks
        self._news.set()
        self._news = asyncio.Event()

    def batch(self, sequence: int) -> Batch | None:
        """None if the batch is no longer kept, or not there yet."""
        return self._batches[sequence - self.first] if self.first <= sequence <= self.last else None

    async def until(self, sequence: int) -> None:
        """Return once there is a batch with that number."""
        while self.last < sequence:
            await self._news.wait()
