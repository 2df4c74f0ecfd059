"""The spans that an OpenTelemetry collector gets for one request of a disaggregated mesh."""

from bench.trace.collector import Span, otlp_collector
from tests.support.mesh_requests import prompt_of, tokens_of
from tests.support.process_mesh import SLOW_STORE, oracle_settings, process_mesh
from tests.support.waiting import eventually

SERVICES = ("gateway", "scheduler", "prefill", "decode", "kvstore")
# Pairs of a parent and a child.
EXPECTED = {
    ("gateway gateway.request", "gateway gateway.encode"),
    ("gateway gateway.request", "gateway gateway.generate"),
    ("gateway gateway.generate", "gateway gateway.place"),
    ("gateway gateway.place", "scheduler scheduler.place"),
    ("scheduler scheduler.place", "kvstore kvstore.match"),
    ("gateway gateway.generate", "decode decode.request"),
    ("decode decode.request", "rank engine.queue"),
    ("decode decode.request", "rank engine.await_kv"),
    ("decode decode.request", "decode decode.prefill"),
    ("decode decode.prefill", "prefill prefill.prompt"),
    ("prefill prefill.prompt", "rank engine.prompt"),
    ("prefill prefill.prompt", "rank engine.push"),
    ("decode decode.request", "rank engine.decode"),
}


def pairs(spans: list[Span]) -> set[tuple[str, str]]:
    """Every span with its parent, by service and name."""
    names = {span.span_id: f"{span.service} {span.name}" for span in spans}
    return {(names[span.parent_id], names[span.span_id]) for span in spans if span.parent_id}


async def test_a_disaggregated_request_is_one_trace_of_all_services() -> None:
    async with otlp_collector() as collector:
        traced = tuple(f"{service}.observe.otlp_endpoint={collector.endpoint}" for service in SERVICES)
        settings = (*oracle_settings(), *traced, *SLOW_STORE, "decode.can_prefill=false")
        async with process_mesh(prefill=1, stores=1, settings=settings) as mesh:
            await tokens_of(mesh, prompt_of(500, 1), 20)
            await eventually(lambda: pairs(_whole(collector.spans)) >= EXPECTED)
            spans = collector.spans
    assert len({span.trace_id for span in spans}) == 1
    assert [span.name for span in spans if not span.parent_id] == ["gateway.request"]


def _whole(spans: list[Span]) -> list[Span]:
    """The spans whose ancestors have all arrived, since each process sends its own spans."""
    known = {span.span_id: span for span in spans}

    def rooted(span: Span) -> bool:
        return not span.parent_id or (span.parent_id in known and rooted(known[span.parent_id]))

    return [span for span in spans if rooted(span)]
