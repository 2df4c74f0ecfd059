"""The messages that a link has yet to write to its worker."""

import asyncio
from collections import deque


class Outbox:
    """Ids of streams to submit, to cancel and to acknowledge. Any task adds them; the writer of the stream pops them.

    Submissions outlive a broken stream and wait for the next one. Cancellations and acknowledgements do not: a
    reattachment names the requests that remain, which says the same.
    """

    def __init__(self) -> None:
        self._submissions: deque[int] = deque()
        self._cancellations: list[int] = []
        self._acknowledgements: list[int] = []
        self._put_in = asyncio.Event()

    def submit(self, stream_id: int) -> None:
        self._submissions.append(stream_id)
        self._put_in.set()

    def cancel(self, stream_id: int) -> None:
        self._cancellations.append(stream_id)
        self._put_in.set()

    def acknowledge(self, stream_id: int) -> None:
        self._acknowledgements.append(stream_id)
        self._put_in.set()

    def reattach(self) -> None:
        """Drop cancellations and acknowledgements: the reattachment's list of requests replaces them."""
        self._cancellations.clear()
        self._acknowledgements.clear()

    async def filled(self) -> None:
        """Return once there is something to pop."""
        while not (self._submissions or self._cancellations or self._acknowledgements):
            self._put_in.clear()
            await self._put_in.wait()

    def pop_submission(self) -> int | None:
        """The oldest submission."""
        return self._submissions.popleft() if self._submissions else None

    def pop_cancellation(self) -> int | None:
        return self._cancellations.pop() if self._cancellations else None

    def pop_acknowledgements(self) -> list[int]:
        """All acknowledgements: one message has room for many."""
        acknowledged, self._acknowledgements = self._acknowledgements, []
        return acknowledged
