"""Process-wide settings for a process that moves the KV of a GPU. Only its main applies them.

UCX wakes no thread for transfers between GPUs, so the transfer thread polls while another thread runs the steps.
"""

import ctypes
import os
import sys

# After this long the polling thread yields the interpreter lock to a waiting thread. Python's default of 5 ms would
# delay each message between the two ends of a push, which takes 1 ms, and the steps of the rank.
SWITCH_INTERVAL_SECONDS = 1e-4
# The polling thread sleeps for 50 us at a time. By default Linux may extend each sleep by 50 us.
TIMER_SLACK_NS = 1000
# UCX spreads copies over 16 streams. Segments then share the wire, arrive late together, and wait together to be
# verified: a push that was alone took 3.04 ms with 16 streams and 2.30 ms with one. This is an environment variable
# because UCX rejects the name as a setting of its context if it finds no GPU.
IPC_STREAMS = ("UCX_CUDA_IPC_MAX_STREAMS", "1")

_PR_SET_TIMERSLACK = 29


def tune_for_gpu_transfers() -> None:
    """Call it in the main thread, before the transfer agent and its thread are made. The user's own UCX variables
    win.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _set_timer_slack(TIMER_SLACK_NS)
    os.environ.setdefault(*IPC_STREAMS)


def _set_timer_slack(nanoseconds: int) -> None:
    """Set the slack of the calling thread, and of the threads that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
