"""A child that this process had before it became another program (exec), and that asyncio therefore does not know."""

import asyncio
import os
import signal


class AdoptedProcess:
    """The part of asyncio's Process that a rank's client needs. Call `wait` only once."""

    def __init__(self, process_id: int) -> None:
        self.pid = process_id
        # This also works if the process has ended: it stays a zombie until we wait for it.
        self._descriptor = os.pidfd_open(process_id)

    def kill(self) -> None:
        """Raises ProcessLookupError if the process has ended."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def wait(self) -> int:
        """The exit status, once the process has ended; a negative status is the number of a signal."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        # The descriptor becomes readable when the process ends.
        loop.add_reader(self._descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._descriptor)
        # The process has ended, so this returns at once.
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222
        return os.waitstatus_to_exitcode(status)
