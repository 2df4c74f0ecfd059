"""Runs what a service does all the time."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `works` until the block ends, and then cancel them. If one fails, cancel the block and raise the error: a
    service must not go on without a part of itself.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
            yield
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        # The first one; an error of the block itself is raised as it is.
        raise failures.exceptions[0] from None
