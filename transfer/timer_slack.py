"""How much later than asked for Linux may wake a thread."""

import ctypes
import os

_PR_SET_TIMERSLACK = 29


def set_timer_slack(nanoseconds: int) -> None:
    """Of the calling thread; by default 50,000."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
