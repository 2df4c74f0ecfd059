"""Standard streams that every program can rely on: a closed one is /dev/null, and no character is refused."""

import os
import select
import sys
from contextlib import suppress
from io import TextIOWrapper, UnsupportedOperation


def settle() -> None:
    """Call it first, before anything opens a file, which would get the number of a closed stream."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python sets a stream to None if its file was closed.
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def complain(text: str) -> None:
    """Write a line to stderr, unless that is full, gone, or not read."""
    try:
        descriptor = sys.stderr.fileno()
    except UnsupportedOperation:
        sys.stderr.write(f"{text}\n")
        return
    # Past Python's buffer: what it could not write would be tried again at the exit, and change the exit status.
    with suppress(OSError):
        if takes_more(descriptor):
            os.write(descriptor, f"{text}\n".encode(sys.stderr.encoding, "backslashreplace"))


def takes_more(descriptor: int, seconds: float | None = 0.0) -> bool:
    """Whether the file takes PIPE_BUF bytes, or an error, without waiting for a reader; asked for up to `seconds`,
    None being for ever.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(None if seconds is None else seconds * 1000))
