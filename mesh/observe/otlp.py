"""Sends spans to an OpenTelemetry collector, by OTLP over gRPC. Imported only if that is configured."""

import logging
import os
import socket
import time

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from mesh.observe.tracing import SpanEvent, TraceContext

# How long spans wait to be sent in a batch, and how long a collector may take for one.
BATCH_MS = 500
SEND_SECONDS = 5


class OtlpSpans(logging.Handler):
    """Sends the spans of traces from its own thread; spans that the collector does not take are lost."""

    def __init__(self, service: str, endpoint: str) -> None:
        super().__init__()
        instance = f"{socket.gethostname()}:{os.getpid()}"
        self._resource = Resource(
            {"service.namespace": "deepmesh", "service.name": service, "service.instance.id": instance}
        )
        exporter = OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https:"), timeout=SEND_SECONDS)
        self._processor = BatchSpanProcessor(exporter, schedule_delay_millis=BATCH_MS)

    def emit(self, record: logging.LogRecord) -> None:
        span: SpanEvent = record.__dict__["event"]
        if span.context is not None and span.context.sampled:
            self._processor.on_end(self._readable(str(record.msg), span, span.context))

    def close(self) -> None:
        self._processor.shutdown()
        super().close()

    def _readable(self, name: str, span: SpanEvent, context: TraceContext) -> ReadableSpan:
        # The collector needs wall-clock time, while spans use the monotonic clock.
        start = time.time_ns() - (time.perf_counter_ns() - span.start_ns)
        attributes = {key: _value(value) for key, value in span.attributes.items()}
        if span.request_id is not None:
            attributes.setdefault("request_id", span.request_id)
        error = attributes.get("error")
        return ReadableSpan(
            name=name,
            context=_span_context(context, is_remote=False),
            parent=_span_context(span.parent, is_remote=True) if span.parent and span.parent.span_id else None,
            resource=self._resource,
            attributes=attributes,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, str(error)),
            start_time=start,
            end_time=start + span.elapsed_ns,
        )


def _span_context(context: TraceContext, is_remote: bool) -> SpanContext:
    return SpanContext(context.trace_id, context.span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _value(value: object) -> AttributeValue:
    return value if isinstance(value, bool | int | float | str) else str(value)
