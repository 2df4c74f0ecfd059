"""An exit status in words."""

import signal


def describe_status(status: int) -> str:
    """`status` is a process's exit status; a negative one is the number of the signal that ended it."""
    if status >= 0:
        return f"status {status}"
    # Python names only the first and the last real-time signal.
    named = signal.Signals.__members__.values()
    return f"signal {signal.Signals(-status).name if -status in named else -status}"
