"""Wakes a thread that polls file descriptors."""

import os


class EventFd:
    """An eventfd: like threading.Event, but a thread can poll it together with other descriptors.

    It is readable from `set` until the next `clear`.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """descriptor: a non-blocking eventfd that another process made; by default a new one."""
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if descriptor is None else descriptor

    def fileno(self) -> int:
        return self._descriptor

    def set(self) -> None:
        """May be called from any thread, and from another process."""
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Clear it; returns whether it was set. Check for news after this call, not before, or news in between is
        missed.
        """
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)
