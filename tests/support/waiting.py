"""Waits for conditions that come true without a signal."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

# Only ends a hang: on an idle machine no test waits for a tenth of it.
PATIENCE_SECONDS = 60.0


async def eventually(condition: Callable[[], bool | Awaitable[bool]], seconds: float = PATIENCE_SECONDS) -> None:
    """Return once `condition()` holds; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        held = condition()
        if await held if inspect.isawaitable(held) else held:
            return
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """As `eventually`, without an event loop. It lets other threads run between two looks."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.0005)
