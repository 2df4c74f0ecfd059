"""Signals to stop: until a service waits for them they end its process."""

import asyncio
import os
import signal
from types import FrameType


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP, which a terminal sends as it closes, unless it is ignored: nohup wants that."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([] if ignored else [signal.SIGHUP])]


def end_on_signals() -> None:
    """Have `stop_signals` that nothing handles end this process at once if it is a container's first one, as they end
    any other. Call it before a start that takes long, in the main thread.

    The kernel drops signals that such a process does not handle: it would start, serve, and be killed with requests.
    """
    for number in stop_signals():
        if os.getpid() == 1 and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


async def until_signal() -> None:
    """Return at the first of `stop_signals`; a second one ends the process. Call it in the main thread."""
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
        end_on_signals()


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
