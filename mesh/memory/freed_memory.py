"""Gives freed memory back to the system. The C library, if it is glibc, keeps it otherwise."""

import asyncio
import ctypes

import psutil

LOOK_SECONDS = 30.0
# Twice as long after each time that it helped little: what is resident is in use then.
MOST_SECONDS = 960.0
GROWTH_BYTES = 64 << 20


def release_freed_memory() -> None:
    """Return freed heap pages to the system if the C library can.

    Costs about 10 ms per 100 MB; worth it after work that took much memory once.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def release_grown_memory() -> None:
    """Release freed memory whenever the process has grown, as it does when thousands of clients come at once.

    Runs until cancelled.
    """
    least, pause = resident_bytes(), LOOK_SECONDS
    while True:
        await asyncio.sleep(pause)
        try:
            before = after = resident_bytes()
        except OSError:
            # Strangers' connections may have taken all files that the process may open.
            continue
        helped = True
        if before > least + GROWTH_BYTES:
            await asyncio.to_thread(release_freed_memory)
            after = resident_bytes()
            helped = before - after > GROWTH_BYTES // 2
        least = min(least, after)
        pause = LOOK_SECONDS if helped else min(2 * pause, MOST_SECONDS)


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)
