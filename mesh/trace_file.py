"""Spans in a file of Chrome trace events, for one machine.

A trace file is Chrome's JSON array of trace events with one event a line: open it in https://ui.perfetto.dev, or read
it with json once the service has stopped. Times are the machine's monotonic clock, so that files of several processes
of one machine line up.
"""

import json
import logging
import os
import threading
from pathlib import Path
from typing import TextIO

from mesh.errors import ConfigError
from mesh.tracing import SpanEvent

_BUFFER_EVENTS = 256


class TraceFile(logging.Handler):
    """Writes spans as complete events ("ph": "X"), a few hundred at a time."""

    def __init__(self, service: str, path: Path) -> None:
        super().__init__()
        try:
            self._file: TextIO = path.open("w")
        except OSError as error:
            raise ConfigError(f"observe.trace_file: cannot write {path}: {error.strerror}") from error
        self._process_id = os.getpid()
        name = {"name": "process_name", "ph": "M", "pid": self._process_id, "args": {"name": service}}
        self._file.write("[\n" + json.dumps(name))
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
                self._file.write("".join(self._buffer))
                self._file.flush()
                self._buffer.clear()

    def close(self) -> None:
        self.flush()
        if not self._file.closed:
            self._file.write("\n]\n")
            self._file.close()
        super().close()
