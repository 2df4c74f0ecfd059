"""Draws docs/trace.png: one request of a disaggregated mesh whose prompt's prefix comes from the KV store.

    python -m bench.trace [--out docs/trace.png]

A mesh of tiny-r1 with a prefill worker and a store answers a prompt, then others until both workers have forgotten it,
then the first prompt again. The picture shows that last request, from the spans that an OpenTelemetry collector got.
"""

import argparse
import asyncio
import random
import secrets
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import uvloop
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc
from rich.console import Console

from bench.meshes.model_mesh import FIRST_TOKEN, LAST_TOKEN, model_mesh
from bench.trace.collector import Collector, Span, otlp_collector
from bench.trace.picture import draw
from mesh.observe.tracing import TRACEPARENT_KEY, TraceContext

PROMPT_TOKENS = 900
OUTPUT_TOKENS = 6
# This many other prompts fill the pools.
OTHERS = 8
POOL_BLOCKS = 48
SERVICES = ("gateway", "scheduler", "prefill", "decode", "kvstore")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.trace", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/trace.png"), metavar="PATH")
    options = parser.parse_args(arguments)
    spans = uvloop.run(trace_request())
    draw(spans, options.out)
    Console(stderr=True).print(f"{len(spans)} spans of {len({span.service for span in spans})} services: {options.out}")
    return 0


async def trace_request() -> list[Span]:
    """The spans of the last request."""
    trace = TraceContext(secrets.randbits(128) | 1, 1)
    async with otlp_collector() as collector:
        with TemporaryDirectory() as directory:
            settings = (
                *(f"{service}.observe.otlp_endpoint={collector.endpoint}" for service in SERVICES),
                *(f"{worker}.engine.total_blocks={POOL_BLOCKS}" for worker in ("prefill", "decode")),
                # Else a worker's own memory would have what the trace shows a store to bring.
                *(f"{worker}.engine.host_blocks=0" for worker in ("prefill", "decode")),
                "decode.can_prefill=false",
            )
            async with model_mesh(Path(directory) / "log", prefill=1, stores=1, settings=settings) as mesh:
                await _ask_all(mesh.gateway, trace)
        # The services have stopped, so that they have sent all their spans.
        return _of(collector, trace)


async def _ask_all(endpoint: str, trace: TraceContext) -> None:
    source = random.Random(0)
    prompts = [[source.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(PROMPT_TOKENS)] for _ in range(1 + OTHERS)]
    async with grpc.aio.insecure_channel(endpoint) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for prompt in prompts:
            await _ask(stub, prompt)
        # Blocks are offered to the store after the answer.
        await asyncio.sleep(1.0)
        await _ask(stub, prompts[0], trace)


async def _ask(stub: gateway_pb2_grpc.GatewayServiceStub, prompt: list[int], trace: TraceContext | None = None) -> None:
    form = gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt))
    request = gateway_pb2.GenerateRequest(prompt=form, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    metadata = () if trace is None else ((TRACEPARENT_KEY, trace.traceparent),)
    async for _ in stub.Generate(request, timeout=60, metadata=metadata):
        pass


def _of(collector: Collector, trace: TraceContext) -> list[Span]:
    trace_id = trace.trace_id.to_bytes(16, "big")
    return [span for span in collector.spans if span.trace_id == trace_id]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
