"""Spans, which time pieces of work, and the request id that accompanies a request everywhere."""

import logging
import secrets
import time
from contextvars import ContextVar
from functools import cache
from types import TracebackType
from typing import Self

from prometheus_client import Histogram

from mesh.observe.metrics import SPAN_SECONDS
from mesh.observe.tracing import SpanEvent, TraceContext, trace_context

# The id of the request being served, the same from the edge to the last worker; None outside requests.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

# The standard library has one table of loggers per process, so these are no globals of our own.
_span_log = logging.getLogger("deepmesh.span")
_trace_log = logging.getLogger("deepmesh.trace")


def new_request_id() -> str:
    return secrets.token_hex(8)


class span:
    """Times a piece of work, as in `with span("kv.push", size_bytes=n):`, in plain and in async code.

    Feeds the histogram `deepmesh_span_seconds{name}`, the debug log and the trace. Use only a fixed small set of names.
    Work that begins in one call and ends in another uses `begin` and `end` instead of the block.

    Attributes:
        context: the parent for spans inside this one; None outside traces.
    """

    __slots__ = ("_attributes", "_name", "_parent", "_start_ns", "context")

    def __init__(self, name: str, **attributes: object) -> None:
        self._name = name
        self._attributes = attributes

    def begin(self, parent: TraceContext | None) -> Self:
        """Start the clock."""
        self._parent = parent
        self.context = None if parent is None else parent.child()
        self._start_ns = time.perf_counter_ns()
        return self

    def end(self, **attributes: object) -> None:
        """Stop the clock. `attributes`: those that are known only now."""
        elapsed_ns = time.perf_counter_ns() - self._start_ns
        _histogram(self._name).observe(elapsed_ns * 1e-9)
        if attributes:
            self._attributes |= attributes
        if _span_log.isEnabledFor(logging.DEBUG):
            _span_log.debug(self._name, extra={"fields": {**self._attributes, "ms": round(elapsed_ns * 1e-6, 3)}})
        if _trace_log.handlers:
            event = SpanEvent(
                self._start_ns, elapsed_ns, self._attributes, request_id.get(), self.context, self._parent
            )
            _trace_log.info(self._name, extra={"event": event})

    def __enter__(self) -> None:
        self.begin(trace_context.get())
        if self.context is not None:
            trace_context.set(self.context)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.context is not None:
            trace_context.set(self._parent)
        if kind is None:
            self.end()
        else:
            self.end(error=kind.__name__)


@cache
def _histogram(name: str) -> Histogram:
    return SPAN_SECONDS.labels(name)
