from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mesh.observe.spans import span
from mesh.observe.tracing import Sampler, TraceContext, current_traceparent, trace_context
from mesh.rpc.outgoing_calls import request_metadata
from tests.support.kept_spans import kept_spans

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@contextmanager
def under(context: TraceContext | None) -> Iterator[None]:
    token = trace_context.set(context)
    try:
        yield
    finally:
        trace_context.reset(token)


def test_a_w3c_header_is_read_and_written_as_it_is() -> None:
    context = TraceContext.parse(PARENT)
    assert context is not None
    assert context == TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, True)
    assert context.traceparent == PARENT


@pytest.mark.parametrize(
    "header",
    [None, "", "00-0-0-01", PARENT.upper(), PARENT.replace("00-4", "ff-4"), f"00-{'0' * 32}-00f067aa0ba902b7-01"],
)
def test_what_is_no_w3c_header_names_no_span(header: str | None) -> None:
    assert TraceContext.parse(header) is None


def test_a_header_of_a_later_version_is_read() -> None:
    assert TraceContext.parse(f"01{PARENT[2:]}-more") == TraceContext.parse(PARENT)


def test_spans_stand_under_the_span_around_them() -> None:
    with under(TraceContext.parse(PARENT)), kept_spans() as spans:
        with span("outer"), span("inner"):
            pass
        assert current_traceparent() == PARENT
    outer, inner = spans["outer"], spans["inner"]
    assert outer.parent == TraceContext.parse(PARENT)
    assert inner.parent == outer.context
    assert inner.context is not None and inner.context.trace_id == 0x4BF92F3577B34DA6A3CE929D0E0E4736


def test_calls_inside_a_span_name_it() -> None:
    with under(TraceContext.parse(PARENT)), kept_spans() as spans, span("work"):
        metadata = dict(request_metadata())
    context = spans["work"].context
    assert context is not None and metadata == {"traceparent": context.traceparent}


def test_work_that_a_callback_ends_is_one_span() -> None:
    with kept_spans() as spans:
        work = span("work", blocks=3).begin(TraceContext.parse(PARENT))
        assert current_traceparent() is None
        work.end(size_bytes=7)
    assert spans["work"].attributes == {"blocks": 3, "size_bytes": 7}
    assert spans["work"].parent == TraceContext.parse(PARENT)


def test_an_unrecorded_trace_is_passed_on_unchanged() -> None:
    header = PARENT[:-1] + "0"
    with under(TraceContext.parse(header)), span("work"):
        assert current_traceparent() == header


def test_outside_traces_spans_have_no_context() -> None:
    with kept_spans() as spans, span("work"):
        assert current_traceparent() is None
    assert spans["work"].context is None


def test_a_sampled_traces_first_span_has_no_parent() -> None:
    with under(None):
        Sampler(1.0).begin()
        assert current_traceparent() is None
        with span("root"):
            assert current_traceparent() is not None


def test_a_sampler_leaves_the_clients_decision() -> None:
    with under(TraceContext.parse(PARENT)):
        Sampler(1.0).begin()
        assert current_traceparent() == PARENT


def test_a_sampler_without_a_share_begins_nothing() -> None:
    with under(None):
        Sampler(0.0).begin()
        assert trace_context.get() is None
