"""The transfer thread: it polls while there is work, and otherwise sleeps until UCX or its owner wakes it."""

import logging
import math
import select
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

from mesh.event_fd import EventFd
from transfer.ucx import UcxTransport

logger = logging.getLogger(__name__)

# Computing its checksum is a call that releases the interpreter lock for some microseconds, so that other threads run
# between two polls. If the thread slept that long instead, a push would take a tenth longer.
_CHECKSUMMED = bytes(16 << 10)
# Pause between polls once busy polling is over, while something is in flight whose end UCX does not signal.
_POLL_SECONDS = 50e-6
# How often connections to peers that are gone are dropped.
_DEAD_PEERS_SECONDS = 5.0


class Work(Protocol):
    """The work of the thread: `exchange.Exchange`."""

    # Whether UCX wakes no thread when something completes.
    needs_polling: bool

    @property
    def in_flight(self) -> bool: ...

    @property
    def busy_poll_seconds(self) -> float:
        """How long the thread polls without a pause after it last had work."""
        ...

    @property
    def next_deadline(self) -> float | None: ...

    def begin(self) -> None:
        """Called first, by the thread that polls."""
        ...

    def poll(self) -> bool:
        """Do what can be done now. Returns whether anything was done."""
        ...


class TransferThread:
    """One thread that owns the UCX worker: it runs posted commands, and polls the work."""

    def __init__(
        self,
        transport: UcxTransport,
        work: Work,
        clock: Callable[[], float],
        announce: Callable[[], None],
    ) -> None:
        """The thread calls `announce` after each poll. The work's deadlines are times of `clock`."""
        self._transport = transport
        self._work = work
        self._clock = clock
        self._announce = announce
        self._commands: deque[Callable[[], None]] = deque()
        self._wakeup = EventFd()
        self._closing = False
        # Grows by one at the beginning and at the end of each pass: odd during a pass.
        self.passes = 0
        # The error that ended the thread; None if `close` did.
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run the command in the thread, after those posted before."""
        self._commands.append(command)
        self._wakeup.set()

    def close(self) -> None:
        """Stop the thread. Every transfer ends here."""
        self._closing = True
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()

    def _run(self) -> None:
        try:
            self._work.begin()
            self._work_until_closed()
        except Exception as error:
            logger.exception("the transfer thread failed")
            self.failure = error
            self._announce()
        finally:
            self._transport.close()

    def _work_until_closed(self) -> None:
        poller = select.poll()
        poller.register(self._transport.fileno(), select.POLLIN)
        poller.register(self._wakeup.fileno(), select.POLLIN)
        last_busy = checked = time.monotonic()
        while not self._closing:
            self.passes += 1
            busy = self._run_once()
            self.passes += 1
            now = time.monotonic()
            if now - checked > _DEAD_PEERS_SECONDS:
                self._transport.drop_dead_peers()
                checked = now
            if busy:
                last_busy = now
            elif now - last_busy < self._work.busy_poll_seconds:
                if self._work.needs_polling:
                    zlib.crc32(_CHECKSUMMED)
            elif self._work.needs_polling and self._work.in_flight:
                time.sleep(_POLL_SECONDS)
            else:
                self._sleep(poller)

    def _run_once(self) -> bool:
        # Progress UCX before running commands: a message that it finds may be for a landing whose command is still
        # queued.
        self._transport.progress()
        commands = len(self._commands)
        for _ in range(commands):
            self._commands.popleft()()
        busy = self._work.poll()
        self._announce()
        return busy or commands > 0

    def _sleep(self, poller: select.poll) -> None:
        """Sleep until there is something to do."""
        if not self._transport.arm() or self._commands:
            return
        for descriptor, _ in poller.poll(self._timeout_ms()):
            if descriptor == self._wakeup.fileno():
                self._wakeup.clear()

    def _timeout_ms(self) -> float:
        deadline = self._work.next_deadline
        until_deadline = math.inf if deadline is None else max(0.0, deadline - self._clock())
        return min(until_deadline, _DEAD_PEERS_SECONDS) * 1000 + 1
