"""Keeps the spans that end in the test's own process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mesh.observe.tracing import SpanEvent


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.spans: dict[str, SpanEvent] = {}

    def emit(self, record: logging.LogRecord) -> None:
        self.spans[record.getMessage()] = record.__dict__["event"]


@contextmanager
def kept_spans() -> Iterator[dict[str, SpanEvent]]:
    """Spans that end inside the block, by name."""
    log, handler = logging.getLogger("deepmesh.trace"), _Kept()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler.spans
    finally:
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
