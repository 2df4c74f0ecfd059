"""A child of this process from before it became another program (exec): asyncio knows nothing of it."""

import asyncio
import os
import signal


class AdoptedProcess:
    """What of asyncio's Process a rank's client needs. `wait` is called once."""

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        # Also of one that has ended: it stays until we ask how.
        self._descriptor = os.pidfd_open(process_id)

    def kill(self) -> None:
        """Raises ProcessLookupError if it has ended."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def wait(self) -> int:
        """Its exit status, once it has ended; a negative one is a signal's number."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        # Readable when it has ended.
        loop.add_reader(self._descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._descriptor)
        # It returns at once.
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222
        return os.waitstatus_to_exitcode(status)
