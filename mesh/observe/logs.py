"""Logs of one line or one JSON object, and where spans are written."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, TextIO

from mesh.config import ObserveConfig
from mesh.errors import ConfigError
from mesh.observe.line_sink import LineSink
from mesh.observe.spans import request_id
from mesh.observe.trace_file import TraceFile

_trace_log = logging.getLogger("deepmesh.trace")
_log = logging.getLogger("deepmesh.observe")
# One line for each generation, if the access log is on.
access_log = logging.getLogger("deepmesh.access")


def configure(service: str, config: ObserveConfig) -> None:
    """Send this process's logs to stderr, and its spans where `config` says. Call it once, at the start.

    Raises ConfigError if the trace file cannot be written, or if OpenTelemetry's packages are not installed.
    """
    for spans in _span_handlers(service, config):
        _trace_log.addHandler(spans)
        _trace_log.setLevel(logging.INFO)
        _trace_log.propagate = False
    handler = LineHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if config.log_format == "json" else LineFormatter(service))
    # At DEBUG, grpc logs a line for every event of its loop.
    logging.getLogger("grpc").setLevel(logging.INFO)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_of_a_lost_call)
    access_log.setLevel(logging.INFO if config.access_log else logging.CRITICAL)
    logging.basicConfig(level=config.log_level, handlers=[handler], force=True)


def _is_not_of_a_lost_call(record: logging.LogRecord) -> bool:
    """grpc logs an error with its traceback where a call ends while its answer is written: its client has left."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


class LineHandler(logging.StreamHandler[LineSink]):
    """Writes records to a stream, which may be full, gone, or not read: see `LineSink`."""

    terminator = ""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(LineSink(stream, self._notice))

    def flush(self) -> None:
        """Nothing to do: this is called after every record, and the sink keeps no line that its file takes."""

    def close(self) -> None:
        self.stream.close()
        super().close()

    def _notice(self, lines: int, why: str) -> str:
        record = logging.LogRecord(_log.name, logging.WARNING, __file__, 0, "log lines are lost", None, None)
        record.__dict__["fields"] = {"lines": lines, "why": why}
        return self.format(record)


def _span_handlers(service: str, config: ObserveConfig) -> Iterator[logging.Handler]:
    """The handlers that write spans out."""
    if config.trace_file is not None:
        path = config.trace_file
        yield TraceFile(service, path.with_name(path.name.replace("%p", str(os.getpid()))))
    if config.otlp_endpoint is not None:
        try:
            from mesh.observe.otlp import OtlpSpans
        except ImportError as error:
            raise ConfigError(
                "observe.otlp_endpoint needs OpenTelemetry's packages: pip install 'deepmesh[otlp]'"
            ) from error
        yield OtlpSpans(service, config.otlp_endpoint)


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
    """One object a line: time (ISO 8601, UTC), level, service, logger, message, and the record's own fields."""

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
    """The record's own fields, and the id of the request being served."""
    fields: dict[str, Any] = dict(getattr(record, "fields", {}))
    if (current := request_id.get()) is not None:
        fields.setdefault("request_id", current)
    return fields
