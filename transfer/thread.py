"""The transfer thread: works while there is something to do, and otherwise sleeps until UCX or its owner wakes it."""

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

# Its checksum is a call that releases the interpreter for some microseconds, and so lets other threads run between two
# polls. Where the thread sleeps so briefly instead, a push takes a tenth longer.
_CHECKSUMMED = bytes(16 << 10)
# Pause between polls when patience is over and something is under way that UCX wakes nobody for.
_POLL_SECONDS = 50e-6
# How often connections to peers that are gone are forgotten.
_SWEEP_SECONDS = 5.0


class Work(Protocol):
    # UCX wakes nobody for what is under way.
    needs_polling: bool

    @property
    def in_flight(self) -> bool: ...

    @property
    def patience_seconds(self) -> float:
        """How long after the last thing that happened it looks on without a pause."""
        ...

    @property
    def next_deadline(self) -> float | None: ...

    def begin(self) -> None:
        """Called first, by the thread of all turns."""
        ...

    def turn(self) -> bool: ...


class TransferThread:
    """Runs posted commands and the work's turns, in one thread that owns the UCX worker."""

    def __init__(
        self,
        transport: UcxTransport,
        work: Work,
        clock: Callable[[], float],
        announce: Callable[[], None],
    ) -> None:
        """`announce` is called after every turn. Deadlines are `clock`'s."""
        self._transport = transport
        self._work = work
        self._clock = clock
        self._announce = announce
        self._commands: deque[Callable[[], None]] = deque()
        self._wakeup = EventFd()
        self._closing = False
        # What ended the thread, where that was not `close`.
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run it soon, in order."""
        self._commands.append(command)
        self._wakeup.set()

    def close(self) -> None:
        """Every transfer under way ends here."""
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
        poll = select.poll()
        poll.register(self._transport.fileno(), select.POLLIN)
        poll.register(self._wakeup.fileno(), select.POLLIN)
        last_busy = swept = time.monotonic()
        while not self._closing:
            busy = self._turn()
            now = time.monotonic()
            if now - swept > _SWEEP_SECONDS:
                self._transport.sweep()
                swept = now
            if busy:
                last_busy = now
            elif now - last_busy < self._work.patience_seconds:
                if self._work.needs_polling:
                    zlib.crc32(_CHECKSUMMED)
            elif self._work.needs_polling and self._work.in_flight:
                time.sleep(_POLL_SECONDS)
            else:
                self._sleep(poll)

    def _turn(self) -> bool:
        # In this order: what has come by now may be for a landing that was posted since the last turn.
        self._transport.progress()
        commands = len(self._commands)
        for _ in range(commands):
            self._commands.popleft()()
        busy = self._work.turn()
        self._announce()
        return busy or commands > 0

    def _sleep(self, poll: select.poll) -> None:
        """Until there is something to do."""
        if not self._transport.arm() or self._commands:
            return
        for descriptor, _ in poll.poll(self._timeout_ms()):
            if descriptor == self._wakeup.fileno():
                self._wakeup.clear()

    def _timeout_ms(self) -> float:
        deadline = self._work.next_deadline
        until_deadline = math.inf if deadline is None else max(0.0, deadline - self._clock())
        return min(until_deadline, _SWEEP_SECONDS) * 1000 + 1
