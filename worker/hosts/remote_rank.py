"""A rank on another host, as the service of the worker's first host sees it."""

import asyncio
import time
from collections.abc import Callable

from engine.protocol.frames import RECEIVE_BYTES
from engine.protocol.pulse import LoopProgress, Pulse
from mesh.errors import EngineFailed

# A host that has said nothing for this long, of which it says something every tenth of a second, is cut off or stopped.
SILENT_SECONDS = 2.0


class RemoteRank:
    """Stands in for a rank's process and its socket, for RankClient. The link to the rank's host feeds it.

    Attributes:
        reader: the rank's output. It raises EngineFailed if the rank is lost with its host.
        is_lost: whether it was.
    """

    def __init__(
        self, write: Callable[[bytes], None], kill: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """write: sends to the rank; kill: has its host's service kill it."""
        self.write = write
        self._kill = kill
        self._clock = clock
        self._heard_at = clock()
        self.reader = asyncio.StreamReader(RECEIVE_BYTES)
        self.is_lost = False
        self._pulse: Pulse | None = None
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def shows_progress_by(self, pulse: Pulse) -> None:
        self._pulse = pulse
        # A host that has joined says nothing until the worker has formed, which may take minutes.
        self._heard_at = self._clock()

    def kill(self) -> None:
        """Does nothing if its host is silent: once that speaks again it would read of this first, and end a rank that
        can be kept. Raises ProcessLookupError if the rank has ended.
        """
        if self._status.done():
            raise ProcessLookupError
        if self._clock() - self._heard_at < SILENT_SECONDS:
            self._kill()

    async def wait(self) -> int:
        """The exit status, once the rank has ended; a negative status is a signal's number. It is -9 if the host is
        lost.
        """
        return await asyncio.shield(self._status)

    def is_closing(self) -> bool:
        return self._status.done()

    def close(self) -> None:
        """Nothing to do: its host's service closes the socket when the rank has ended."""

    def received(self, data: bytes) -> None:
        self._heard_at = self._clock()
        self.reader.feed_data(data)

    def progressed(self, progress: LoopProgress) -> None:
        self._heard_at = self._clock()
        if self._pulse is not None:
            self._pulse.write(progress)

    def ended(self, status: int) -> None:
        if not self._status.done():
            self.reader.feed_eof()
            self._status.set_result(status)

    def lost(self, error: EngineFailed) -> None:
        """Its host's service is gone, and the rank with it."""
        if not self._status.done():
            self.is_lost = True
            self.reader.set_exception(error)
            self._status.set_result(-9)
