"""Waits for the signal to stop."""

import asyncio
import signal


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP, which a terminal sends as it closes, unless it is ignored: nohup wants that."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]


async def until_signal() -> None:
    """Return at the first of `stop_signals`; a second one kills the process. Call it in the main thread."""
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    numbers = stop_signals()
    for number in numbers:
        loop.add_signal_handler(number, received.set)
    try:
        await received.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
