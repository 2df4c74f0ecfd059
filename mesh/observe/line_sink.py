"""Writes lines to a file that may refuse them, or take none for a while."""

import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from mesh.observe.metrics import LOG_LINES_LOST
from mesh.processes.standard_streams import takes_more

_QUEUE_BYTES = 4 << 20
_CLOSING_SECONDS = 1.0


class LineSink:
    """`write` never waits and never raises, whatever happens to the file.

    What the file does not take at once is written by a thread. A line is lost if 4 MiB wait already, or if the file
    refuses it: a full disk, a terminal that is gone. Lost lines are counted, and the next line that the file takes
    follows `notice(lines, why)`.
    """

    def __init__(self, stream: TextIO | None, notice: Callable[[int, str], str]) -> None:
        """stream: a file of the system, to which nothing else writes; None loses every line."""
        self._file = None if stream is None else _LineFile(stream.fileno())
        self._encoding = "utf-8" if stream is None else stream.encoding
        self._notice = notice
        # All that follows is guarded by the condition.
        self._changed = threading.Condition()
        # What the thread has to write: a line, with the notice before it, and how many lines are lost with it. The
        # thread removes it once it is written, so that no other line overtakes it.
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        # Lines lost since the last notice, and why the last of them was.
        self._lost = 0
        self._why = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, line: str) -> None:
        data = self._encoded(line)
        with self._changed:
            if self._file is None or self._closed:
                self._lose(1, "closed")
            elif self._waiting_bytes + len(data) > _QUEUE_BYTES:
                self._lose(1, "not read")
            else:
                self._pass_on(self._file, data)

    def flush(self, seconds: float = _CLOSING_SECONDS) -> bool:
        """Wait until every line is written or lost, for `seconds` at most. Returns whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self) -> None:
        """Wait a second at most for lines that are not written yet. All others are lost."""
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _encoded(self, line: str) -> bytes:
        return f"{line}\n".encode(self._encoding, "backslashreplace")

    def _pass_on(self, file: "_LineFile", data: bytes) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            data = self._encoded(self._notice(lost, self._why)) + data
        if not self._waiting and file.takes_at_once(data):
            self._put(file, data, lost + 1)
            return
        self._waiting.append((data, lost + 1))
        self._waiting_bytes += len(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_waiting, args=(file,), name="log", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _write_waiting(self, file: "_LineFile") -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                data, lines = self._waiting[0]
            self._put(file, data, lines)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(data)
                self._changed.notify_all()

    def _put(self, file: "_LineFile", data: bytes, lines: int) -> None:
        try:
            file.put(data)
        except OSError as error:
            with self._changed:
                self._lose(lines, (error.strerror or str(error)).lower())

    def _lose(self, lines: int, why: str) -> None:
        """lines: one that is lost now, and those lost before that its notice would have told of."""
        self._lost += lines
        self._why = why
        LOG_LINES_LOST.inc()


class _LineFile:
    """A file that ends in whole lines again after a part of one was written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # poll does not say how much a terminal or a socket can take.
        self._poll_tells_room = not (os.isatty(descriptor) or stat.S_ISSOCK(os.fstat(descriptor).st_mode))
        # Whether the last line is not complete.
        self._torn = False

    def takes_at_once(self, data: bytes) -> bool:
        """Whether `put` takes the line, or raises, without waiting for a reader."""
        return self._poll_tells_room and len(data) < select.PIPE_BUF and takes_more(self._descriptor)

    def put(self, line: bytes) -> None:
        """Write a line; waits for a reader. Raises OSError."""
        left = b"\n" + line if self._torn else line
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:
                # Another process that has this file made it non-blocking.
                takes_more(self._descriptor, None)
            else:
                self._torn = bool(left)
