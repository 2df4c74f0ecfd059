"""Wakes a thread that polls file descriptors."""

import os


class EventFd:
    """An eventfd: like threading.Event, but a thread waits for it by polling it together with other descriptors.

    It is readable from `set` until the next `clear`.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def set(self) -> None:
        """From any thread."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Whether it was set. Look at what it announces after this, not before, or news in between is missed."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)
