"""Paths from a source of tokens to the client: direct, through a relay, through a gateway over gRPC and over HTTP."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gateway_relay.event_streams import EventStreams
from bench.gateway_relay.step_clock import engine_steps, source_steps
from bench.gateway_relay.token_streams import GrpcStreams, TokenStreams
from bench.meshes.oracle_mesh import CONTEXT_TOKENS, MODEL, VOCABULARY_SIZE, oracle_mesh
from bench.meshes.processes import pin
from launcher.log_lines import LinePrinter
from launcher.plan import HOST
from launcher.process import Child
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tools.byte_tokenizer import write_tokenizer

PACKAGE = "bench.gateway_relay"
READY_SECONDS = 30.0
STOP_SECONDS = 5.0
LABEL_WIDTH = 9
CONNECTIONS_PER_PROCESS = 8


@dataclass(frozen=True)
class TokenPath:
    """One path. `process_ids`: all processes but the client. `subject`: the name there of the process under test."""

    name: str
    subject: str
    endpoint: str
    process_ids: Mapping[str, int]
    # Opens the stream that tells when this path's tokens were made; None if that cannot be known.
    steps: Callable[[], AbstractAsyncContextManager[list[float]]] | None
    # Whether a step's time is that of a message's arrival, one hop later, rather than the time written in the message.
    steps_one_hop_late: bool = False
    # Given an endpoint and a number, reads this many streams of it.
    read: Callable[[str, int], TokenStreams] = GrpcStreams


@dataclass(frozen=True)
class _Gateway:
    grpc: str
    http: str
    process_id: int


@asynccontextmanager
async def saturated_paths(log: Path, processes: int) -> AsyncIterator[list[TokenPath]]:
    """Paths whose sources make tokens as fast as they are taken. processes: how many a second gateway has.

    If the machine has at least two cores more than `processes`, the gateway has the first `processes` cores for itself;
    otherwise it has the first core.
    """
    cores = sorted(os.sched_getaffinity(0))
    apart = set(cores[: processes if len(cores) >= processes + 2 else 1])
    async with _bare_paths(log, 0.0, apart) as bare, AsyncExitStack() as stack:
        frames_at, frames = await stack.enter_async_context(_started(log, f"{PACKAGE}.frame_source"))
        paths = bare
        for count in sorted({1, processes}):
            gateway = await stack.enter_async_context(_gateway(log, frames_at, count))
            pin(gateway.process_id, {cores[0]} if count == 1 else apart)
            name = "gateway" if count == 1 else f"{count} processes"
            ids = {name: gateway.process_id, "frames": frames}
            # The kernel deals out connections to processes: with enough of them, about evenly.
            over_grpc = partial(GrpcStreams, connections=1 if count == 1 else CONNECTIONS_PER_PROCESS * count)
            paths.append(TokenPath(name, name, gateway.grpc, ids, None, read=over_grpc))
            paths.append(TokenPath(f"{name}, HTTP", name, gateway.http, ids, None, read=EventStreams))
        yield paths


@asynccontextmanager
async def paced_paths(log: Path, streams: int, pace_ms: float) -> AsyncIterator[list[TokenPath]]:
    """Paths whose sources make a token for every stream each `pace_ms`; the gateway is that of a whole mesh."""
    settings = (f"decode.engine.max_requests={streams + 8}", f"decode.engine.oracle.step_ms={pace_ms}")
    core = min(os.sched_getaffinity(0))
    async with _bare_paths(log, pace_ms, {core}) as bare, oracle_mesh(log, settings) as mesh:
        pin(mesh.process_ids["gateway"], {core})
        ids, steps = mesh.process_ids, lambda: engine_steps(mesh.decode)
        yield [
            *bare,
            TokenPath("gateway", "gateway", mesh.gateway, ids, steps, True),
            TokenPath("gateway, HTTP", "gateway", mesh.http, ids, steps, True, EventStreams),
        ]


@asynccontextmanager
async def _bare_paths(log: Path, pace_ms: float, apart: set[int]) -> AsyncIterator[list[TokenPath]]:
    """Start the source and the relay. The relay has the first of the cores `apart`; the client and all else that is
    started run on the cores outside `apart`. With a pace of 0 the source is as fast as it can be.
    """
    cores = os.sched_getaffinity(0)
    # Processes that are started from here on inherit this.
    os.sched_setaffinity(0, cores - apart or cores)
    try:
        async with AsyncExitStack() as stack:
            source_at, source = await stack.enter_async_context(_started(log, f"{PACKAGE}.token_source", str(pace_ms)))
            relay_at, relay = await stack.enter_async_context(_started(log, f"{PACKAGE}.relay", source_at))
            pin(relay, {min(apart)})
            direct = TokenPath("direct", "source", source_at, {"source": source}, lambda: source_steps(source_at))
            ids = {"relay": relay, "source": source}
            yield [direct, TokenPath("relay", "relay", relay_at, ids, lambda: source_steps(source_at))]
    finally:
        os.sched_setaffinity(0, cores)


@asynccontextmanager
async def _gateway(log: Path, scheduler: str, processes: int) -> AsyncIterator[_Gateway]:
    """A gateway alone, with the oracle's tokenizer."""
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), VOCABULARY_SIZE, CONTEXT_TOKENS)
        models = dumps([{"tokenizer_dir": directory, "name": MODEL}])
        port, http_port = free_port(), free_port()
        settings = (
            f"scheduler={scheduler}",
            f"server.port={port}",
            f"http.port={http_port}",
            f"models={models}",
            f"processes={processes}",
        )
        command = ["gateway", *(part for setting in settings for part in ("--set", setting))]
        async with _listening(log, port, command) as (endpoint, process_id):
            yield _Gateway(endpoint, f"{HOST}:{http_port}", process_id)


def _started(log: Path, module: str, *arguments: str) -> AbstractAsyncContextManager[tuple[str, int]]:
    """Run `python -m module PORT arguments`. Gives its endpoint and process id once it listens."""
    port = free_port()
    return _listening(log, port, [module, str(port), *arguments])


@asynccontextmanager
async def _listening(log: Path, port: int, module: list[str]) -> AsyncIterator[tuple[str, int]]:
    with log.open("a", encoding="utf-8") as output, LinePrinter(LABEL_WIDTH, output) as printer:
        command = [sys.executable, "-m", *module]
        child = Child(module[0].removeprefix("bench."), command, printer)
        try:
            await child.start()
            async with Channels().open(f"{HOST}:{port}") as channel, asyncio.timeout(READY_SECONDS):
                await channel.channel_ready()
            yield f"{HOST}:{port}", child.process_id
        finally:
            await child.stop(STOP_SECONDS)
