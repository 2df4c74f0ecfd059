"""Waiting for what happens in its own time."""

import asyncio
import time
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Return once `condition()` holds; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)
