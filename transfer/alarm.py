"""Wakes the transfer thread from another thread."""

import os


class Alarm:
    """An eventfd: `ring` from anywhere, `clear` by the thread that watches `fileno`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Only after it became readable."""
        os.eventfd_read(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)
