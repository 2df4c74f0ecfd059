"""What a process that moves the KV of a GPU sets for all of itself. Its main applies it; nothing else does.

Transfers between GPUs wake nobody, so that the transfer thread polls, beside the thread that runs the steps.
"""

import ctypes
import os
import sys

# After so long the polling thread leaves the interpreter to one that waits for it. Python's 5 ms would hold up each
# message between the two ends of a push, which takes 1 ms, and the steps of the rank.
SWITCH_INTERVAL_SECONDS = 1e-4
# The polling thread sleeps for 50 us at a time. Linux may let it sleep 50 us longer, unless it is told less.
TIMER_SLACK_NS = 1000
# UCX spreads copies over 16 streams. Segments then share the wire, come late together, and wait together to be
# verified: a push that was alone took 3.04 ms with 16 streams and 2.30 with one. It is a variable because UCX refuses
# the name as a setting of its context where it finds no GPU.
IPC_STREAMS = ("UCX_CUDA_IPC_MAX_STREAMS", "1")

_PR_SET_TIMERSLACK = 29


def tune_for_gpu_transfers() -> None:
    """Call it in the main thread, before the transfer agent and its thread are made. The user's UCX variables win."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _set_timer_slack(TIMER_SLACK_NS)
    os.environ.setdefault(*IPC_STREAMS)


def _set_timer_slack(nanoseconds: int) -> None:
    """Set it for the calling thread, and for those that it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
