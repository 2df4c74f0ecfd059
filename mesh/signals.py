"""Waits for the signal to stop."""

import asyncio
import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def until_signal() -> None:
    """Return at the first SIGTERM or SIGINT; a second one kills the process. Call it in the main thread."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, received.set)
    try:
        await received.wait()
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
