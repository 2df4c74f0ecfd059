"""Forks a gateway's processes and keeps them running."""

import os
import signal
import sys
import time
from collections.abc import Callable

from mesh.launch import EXIT_FAILED, EXIT_USELESS_TO_RETRY
from mesh.processes.standard_streams import complain
from mesh.processes.tether import die_with

STOPPING = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*STOPPING, signal.SIGCHLD)
FIRST_PAUSE_SECONDS = 0.5
# If one process ends this many times in a row, all are ended.
MOST_ENDS = 5
# A process that ran longer than this counts as well started.
STEADY_SECONDS = 10.0


class Keeper:
    """Does nothing but fork and handle signals. It must have no threads: a fork would copy only one of them."""

    def __init__(self, count: int, ended: Callable[[int], None]) -> None:
        """ended: called with the number of each process that ended."""
        self._count = count
        self._ended = ended
        # Number and start time of each running process, by process id.
        self._running: dict[int, tuple[int, float]] = {}
        # When each process that is not running is started again, by number.
        self._due: dict[int, float] = {}
        self._ends = [0] * count
        self._stopping = False
        self._status = 0

    def run(self) -> int:
        """Fork the processes and keep them running. Returns the process's number in each forked process. In the caller
        it does not return: it raises SystemExit once all processes have ended.
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
            # If this process was stopped (SIGSTOP) until the pause was over, CPython reports a signal that never came.
            if received is not None and received.si_signo in STOPPING:
                self._stop()
            self._reap()

    def _start_due(self) -> int | None:
        """Start the processes that are due. Returns the number in a new process, None in the caller."""
        parent, now = os.getpid(), time.monotonic()
        for number in [number for number, due in self._due.items() if due <= now]:
            del self._due[number]
            process_id = os.fork()
            if process_id == 0:
                die_with(parent)
                # A group of its own: Ctrl-C in a terminal then reaches only the parent, which passes it on.
                os.setpgid(0, 0)
                return number
            self._running[process_id] = (number, now)
        return None

    def _stop(self) -> None:
        """Ask all processes to stop; the second time, kill them."""
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
        complain(f"gateway: process {number} ended with {status}: it is started again in {pause:g} s")
        self._due[number] = time.monotonic() + pause
