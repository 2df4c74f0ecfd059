"""Traces across services: the current span of the current trace, in the W3C's wire format."""

import random
import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import NamedTuple, Self

TRACEPARENT_KEY = "traceparent"
# https://www.w3.org/TR/trace-context/#traceparent-header; later versions may append fields.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED = 1


class TraceContext(NamedTuple):
    """Identifies a span across services."""

    # 128 and 64 bits. Span id 0 means no span: the trace has just begun.
    trace_id: int
    span_id: int
    # Whether its spans are recorded.
    sampled: bool = True

    @classmethod
    def parse(cls, traceparent: str | bytes | None) -> Self | None:
        """The span in a caller's header; None if there is none, or if it is malformed."""
        match = _TRACEPARENT.fullmatch(traceparent) if isinstance(traceparent, str) else None
        if match is None:
            return None
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        return cls(trace_id, span_id, bool(flags & _SAMPLED)) if trace_id and span_id else None

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.sampled):02x}"

    def child(self) -> "TraceContext":
        """A new span below this one; this one itself if the trace is not recorded."""
        return self._replace(span_id=random.getrandbits(64) or 1) if self.sampled else self


# The parent of spans that begin now; None outside traces.
trace_context: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def current_traceparent() -> str | None:
    """The current span's name for other services; None outside traces."""
    current = trace_context.get()
    return current.traceparent if current is not None and current.span_id else None


class Sampler:
    """Begins traces at the edge of the mesh, for the given share of requests (0 to 1)."""

    def __init__(self, share: float) -> None:
        self._share = share

    def begin(self) -> None:
        """Begin a trace in the current context, unless the client has decided about it."""
        if self._share and trace_context.get() is None and random.random() < self._share:
            trace_context.set(TraceContext(random.getrandbits(128) or 1, 0))


class SpanEvent(NamedTuple):
    """A span that has ended, as it is passed to whatever writes spans out."""

    # Start time on the machine's monotonic clock.
    start_ns: int
    elapsed_ns: int
    attributes: Mapping[str, object]
    request_id: str | None
    # The span's own context, and its parent's; None outside traces.
    context: TraceContext | None
    parent: TraceContext | None
