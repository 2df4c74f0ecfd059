"""An OpenTelemetry collector that keeps the spans it is sent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: bytes
    span_id: bytes
    # Empty at the root.
    parent_id: bytes
    start_ns: int
    end_ns: int


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id,
        span.span_id,
        span.parent_span_id,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
    )


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`endpoint` is what `observe.otlp_endpoint` is set to."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    @property
    def names(self) -> set[tuple[str, str]]:
        """Service and name of each span."""
        return {(span.service, span.name) for span in self.spans}

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            service = next(
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            )
            for scope in resource.scope_spans:
                self.spans += [_span(service, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@asynccontextmanager
async def otlp_collector() -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
