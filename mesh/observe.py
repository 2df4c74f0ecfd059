"""Logs of one line or one JSON object, spans, and the request id that goes with a request everywhere.

A trace file is Chrome's JSON array of trace events with one event a line: open it in https://ui.perfetto.dev, or read
it with json once the service has stopped. Times are the machine's monotonic clock, so that files of several processes
of one machine line up.
"""

import json
import logging
import os
import secrets
import threading
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from prometheus_client import Histogram

from mesh.config import ObserveConfig
from mesh.errors import ConfigError
from mesh.metrics import SPAN_SECONDS

# The id of the request being served, the same from the edge to the last worker; None outside requests.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

_TRACE_BUFFER_EVENTS = 256
# Loggers instead of globals of our own: the standard library keeps one table of them per process.
_span_log = logging.getLogger("deepmesh.span")
_trace_log = logging.getLogger("deepmesh.trace")
# One line for each generation, if that is asked for.
access_log = logging.getLogger("deepmesh.access")


def new_request_id() -> str:
    return secrets.token_hex(8)


def configure(service: str, config: ObserveConfig) -> None:
    """Send this process's logs to stderr, and its spans to `config.trace_file` where set. Call it once, at the start.

    Raises ConfigError if the trace file cannot be written.
    """
    if config.trace_file is not None:
        path = config.trace_file
        trace = TraceHandler(service, path.with_name(path.name.replace("%p", str(os.getpid()))))
        _trace_log.addHandler(trace)
        _trace_log.setLevel(logging.INFO)
        _trace_log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(service) if config.log_format == "json" else LineFormatter(service))
    # At DEBUG it has a line for every event of its loop.
    logging.getLogger("grpc").setLevel(logging.INFO)
    access_log.setLevel(logging.INFO if config.access_log else logging.CRITICAL)
    logging.basicConfig(level=config.log_level, handlers=[handler], force=True)


class LineFormatter(logging.Formatter):
    """`23:59:01.123 INFO  scheduler  message key=value request_id=...`; keys come from `extra={"fields": {...}}`."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<5} {self._service:<10} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line: time (ISO 8601, UTC), level, service, logger, message, and the fields beside them."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = {
            **_fields(record),
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The record's own fields, and the request being served."""
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    if (current := request_id.get()) is not None:
        fields.setdefault("request_id", current)
    return fields


class span:
    """Times a piece of work, as in `with span("kv.push", size_bytes=n):`, in plain and in async code.

    Feeds the histogram `deepmesh_span_seconds{name}`, the debug log and the trace. `name` is one of a fixed few.
    """

    __slots__ = ("_attributes", "_name", "_start_ns")

    def __init__(self, name: str, **attributes: object) -> None:
        self._name = name
        self._attributes = attributes

    def __enter__(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        elapsed_ns = time.perf_counter_ns() - self._start_ns
        _histogram(self._name).observe(elapsed_ns * 1e-9)
        if _span_log.isEnabledFor(logging.DEBUG):
            fields = {**self._attributes, "ms": round(elapsed_ns * 1e-6, 3)}
            if kind is not None:
                fields["error"] = kind.__name__
            _span_log.debug(self._name, extra={"fields": fields})
        if _trace_log.handlers:
            event = (self._start_ns, elapsed_ns, self._attributes, request_id.get())
            _trace_log.info(self._name, extra={"event": event})


@cache
def _histogram(name: str) -> Histogram:
    return SPAN_SECONDS.labels(name)


class TraceHandler(logging.Handler):
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
        start_ns, elapsed_ns, attributes, current_request = record.__dict__["event"]
        arguments = attributes if current_request is None else {"request_id": current_request, **attributes}
        event = {
            "name": record.msg,
            "ph": "X",
            "ts": start_ns / 1000,
            "dur": elapsed_ns / 1000,
            "pid": self._process_id,
            "tid": threading.get_native_id(),
            "args": arguments,
        }
        self._buffer.append(",\n" + json.dumps(event, default=str))
        if len(self._buffer) >= _TRACE_BUFFER_EVENTS:
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
