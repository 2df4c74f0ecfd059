"""Forks a gateway's processes and keeps them running."""

import os
import signal
import sys
import time
from collections.abc import Callable

from mesh.launch import EXIT_FAILED, EXIT_USELESS_TO_RETRY
from mesh.tether import die_with

STOPPING = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOPPING, signal.SIGCHLD)
FIRST_PAUSE_SECONDS = 0.5
# Ends in a row, of one process, after which all of them end.
MOST_ENDS = 5
# A process that ran for so long had a good start.
STEADY_SECONDS = 10.0


class Keeper:
    """Nothing but forks and signals: it must have no threads, so that what it forks is whole."""

    def __init__(self, count: int, ended: Callable[[int], None]) -> None:
        """ended: is told the number of each process that ended."""
        self._count = count
        self._ended = ended
        # Numbers and begins of what runs, by process id.
        self._running: dict[int, tuple[int, float]] = {}
        # When those that do not are started again.
        self._due: dict[int, float] = {}
        self._ends = [0] * count
        self._stopping = False
        self._status = 0

    def run(self) -> int:
        """In each process that it forks it returns the process's number. The caller itself is not returned to: it gets
        SystemExit once all processes have ended.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._due = dict.fromkeys(range(self._count), 0.0)
        while True:
            number = self._start_due()
            if number is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                return number
            if not self._running and not self._due:
                sys.exit(self._status)
            pause = max(0.0, min(self._due.values()) - time.monotonic()) if self._due else None
            received = signal.sigwaitinfo(SIGNALS) if pause is None else signal.sigtimedwait(SIGNALS, pause)
            # Stopped (SIGSTOP) until the pause was over, CPython tells of a signal that nobody sent.
            if received is not None and received.si_signo in STOPPING:
                self._stop()
            self._reap()

    def _start_due(self) -> int | None:
        """The number of the process, in a new one; None in the caller."""
        parent, now = os.getpid(), time.monotonic()
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            process_id = os.fork()
            if process_id == 0:
                die_with(parent)
                # A terminal's Ctrl-C goes to the parent alone, which passes it on.
                os.setpgid(0, 0)
                return number
            self._running[process_id] = (number, now)
        return None

    def _stop(self) -> None:
        """Ask all to stop; asked again, kill them."""
        for process_id in self._running:
            os.kill(process_id, signal.SIGKILL if self._stopping else signal.SIGTERM)
        self._stopping = True
        self._due.clear()

    def _reap(self) -> None:
        while self._running:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if process_id == 0:
                return
            number, began_at = self._running.pop(process_id)
            self._ended(number)
            self._note_end(number, os.waitstatus_to_exitcode(status), time.monotonic() - began_at)

    def _note_end(self, number: int, status: int, lived_seconds: float) -> None:
        if self._stopping:
            self._status = self._status or (EXIT_FAILED if status else 0)
            return
        self._ends[number] = 1 if lived_seconds > STEADY_SECONDS else self._ends[number] + 1
        if status == EXIT_USELESS_TO_RETRY or self._ends[number] > MOST_ENDS:
            self._status = status if status == EXIT_USELESS_TO_RETRY else EXIT_FAILED
            self._stop()
            return
        pause = FIRST_PAUSE_SECONDS * 2 ** (self._ends[number] - 1)
        sys.stderr.write(f"gateway: process {number} ended with {status}: it is started again in {pause:g} s\n")
        sys.stderr.flush()
        self._due[number] = time.monotonic() + pause
