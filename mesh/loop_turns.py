"""Divides the event loop among large requests."""

import asyncio

# Takes a few milliseconds to read at most.
SMALL_BYTES = 65536


class LoopTurns:
    """Lets one caller go on in each pass of the event loop.

    Reading a large request cannot be interrupted, for up to 0.2 s. If many arrive at once, everything else waits for
    one of them at a time, and not for all.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self, size_bytes: int) -> None:
        """Wait until a request of this size may be read; a small one may at once."""
        if size_bytes <= SMALL_BYTES:
            return
        # The caller goes on in the pass in which it gives the lock to the next one, who goes on two passes later.
        async with self._lock:
            await asyncio.sleep(0)
