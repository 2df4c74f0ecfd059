"""Writes spans to a file of Chrome trace events, for one machine.

The file is Chrome's JSON array of trace events with one event a line: open it in https://ui.perfetto.dev, or read it
with json once the service has stopped. Times are the machine's monotonic clock, so that files of several processes on
one machine line up.
"""

import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from mesh.errors import ConfigError
from mesh.observe.tracing import SpanEvent

_BUFFER_EVENTS = 256

_log = logging.getLogger("deepmesh.observe")


class TraceFile(logging.Handler):
    """Writes spans as complete events ("ph": "X"), a few hundred at a time. Events that cannot be written are
    dropped.
    """

    def __init__(self, service: str, path: Path) -> None:
        super().__init__()
        try:
            # Unbuffered: a buffer would hold events for which there was no room, and write them later.
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"observe.trace_file: cannot write {path}: {error.strerror}") from error
        self._process_id = os.getpid()
        name = {"name": "process_name", "ph": "M", "pid": self._process_id, "args": {"name": service}}
        self._path = path
        self._written_bytes = 0
        # Whether the last write failed, for example because the disk is full.
        self._failing = False
        self._head = "[\n" + json.dumps(name)
        self._buffer: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        span: SpanEvent = record.__dict__["event"]
        arguments = span.attributes
        if span.request_id is not None:
            arguments = {"request_id": span.request_id, **arguments}
        event = {
            "name": record.msg,
            "ph": "X",
            "ts": span.start_ns / 1000,
            "dur": span.elapsed_ns / 1000,
            "pid": self._process_id,
            "tid": threading.get_native_id(),
            "args": arguments,
        }
        self._buffer.append(",\n" + json.dumps(event, default=str))
        if len(self._buffer) >= _BUFFER_EVENTS:
            self.flush()

    def flush(self) -> None:
        with self.lock or threading.Lock():
            if not self._file.closed:
                self._write("".join(self._buffer))
                self._buffer.clear()

    def close(self) -> None:
        self.flush()
        if not self._file.closed:
            self._write("\n]\n")
            self._file.close()
        super().close()

    def _write(self, text: str) -> None:
        """Write all of `text` or none of it: a part of an event would spoil the file."""
        data = (text if self._written_bytes else self._head + text).encode()
        try:
            written = self._file.write(data)
            why = None if written == len(data) else "no room for all of it"
        except OSError as error:
            why = error.strerror
        if why is None:
            self._written_bytes += len(data)
        else:
            with suppress(OSError):
                self._file.truncate(self._written_bytes)
                self._file.seek(self._written_bytes)
            if not self._failing:
                _log.warning("spans are left out of the trace file", extra={"fields": {"file": self._path, "why": why}})
        self._failing = why is not None
