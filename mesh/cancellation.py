"""Cancellations that gRPC loses: where one arrives as a call fails, the call's error takes its place (grpcio 1.85)."""

import asyncio


def check_cancelled() -> None:
    """Raise CancelledError if the present task has been told to end. Loops that go on after a failed call ask here:
    they are told only once, and whoever waits for them would wait for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def pause(seconds: float) -> None:
    """As asyncio.sleep, between the attempts of such a loop."""
    check_cancelled()
    await asyncio.sleep(seconds)
