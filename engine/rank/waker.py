"""Ends the sleep of a loop that polls descriptors, from any thread."""

import os


class Waker:
    """Readable from the first `wake` after a `clear` on: no wake is lost."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def wake(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def clear(self) -> bool:
        """Whether it was woken. What woke it must be looked at after this, not before."""
        try:
            os.eventfd_read(self._descriptor)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        os.close(self._descriptor)
