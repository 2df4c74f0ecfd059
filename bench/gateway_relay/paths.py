"""The three ways from a source of tokens to the client: straight, through a bare relay, through a gateway."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gateway_relay.step_clock import engine_steps, source_steps
from bench.meshes.oracle_mesh import CONTEXT_TOKENS, MODEL, VOCABULARY_SIZE, oracle_mesh
from bench.meshes.processes import pin
from cli.launcher.composition import HOST
from cli.launcher.log_lines import LinePrinter
from cli.launcher.process import Child
from mesh.channel import Channels
from mesh.ports import free_port
from tools.byte_tokenizer import write_tokenizer

PACKAGE = "bench.gateway_relay"
READY_SECONDS = 30.0
STOP_SECONDS = 5.0
LABEL_WIDTH = 9


@dataclass(frozen=True)
class TokenPath:
    """One way. `subject` names the process that is under test; `process_ids` has all but the client."""

    name: str
    endpoint: str
    process_ids: Mapping[str, int]
    # Opens the stream that tells when this path's tokens were made; None if nothing can.
    steps: Callable[[], AbstractAsyncContextManager[list[float]]] | None
    # Whether a token's time is known by its arrival, one hop later, and not by its content.
    steps_one_hop_late: bool = False


@asynccontextmanager
async def saturated_paths(log: Path) -> AsyncIterator[list[TokenPath]]:
    """Paths whose sources make tokens as fast as they are taken."""
    async with _bare_paths(log, 0.0) as (bare, core), AsyncExitStack() as stack:
        frames_at, frames = await stack.enter_async_context(_started(log, f"{PACKAGE}.frame_source"))
        gateway_at, gateway = await stack.enter_async_context(_gateway(log, frames_at))
        pin(gateway, {core})
        yield [*bare, TokenPath("gateway", gateway_at, {"gateway": gateway, "frames": frames}, None)]


@asynccontextmanager
async def paced_paths(log: Path, streams: int, pace_ms: float) -> AsyncIterator[list[TokenPath]]:
    """Paths whose sources make a token for every stream each `pace_ms`; the gateway is that of a whole mesh."""
    settings = (f"decode.engine.max_requests={streams + 8}", f"decode.engine.oracle.step_ms={pace_ms}")
    async with _bare_paths(log, pace_ms) as (bare, core), oracle_mesh(log, settings) as mesh:
        pin(mesh.process_ids["gateway"], {core})
        yield [*bare, TokenPath("gateway", mesh.gateway, mesh.process_ids, lambda: engine_steps(mesh.decode), True)]


@asynccontextmanager
async def _bare_paths(log: Path, pace_ms: float) -> AsyncIterator[tuple[list[TokenPath], int]]:
    """Source and relay, and the core of whatever is under test: the first that this process may use. The relay is on
    it; all else that is started, and the client, is on the others. A pace of 0 is as fast as it goes.
    """
    cores = sorted(os.sched_getaffinity(0))
    # What is started from here on inherits this.
    os.sched_setaffinity(0, set(cores[1:] or cores))
    try:
        async with AsyncExitStack() as stack:
            source_at, source = await stack.enter_async_context(_started(log, f"{PACKAGE}.token_source", str(pace_ms)))
            relay_at, relay = await stack.enter_async_context(_started(log, f"{PACKAGE}.relay", source_at))
            pin(relay, {cores[0]})
            direct = TokenPath("direct", source_at, {"source": source}, lambda: source_steps(source_at))
            ids = {"relay": relay, "source": source}
            yield [direct, TokenPath("relay", relay_at, ids, lambda: source_steps(source_at))], cores[0]
    finally:
        os.sched_setaffinity(0, set(cores))


@asynccontextmanager
async def _gateway(log: Path, scheduler: str) -> AsyncIterator[tuple[str, int]]:
    """A gateway alone, with the oracle's tokenizer; its gRPC endpoint and process id."""
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), VOCABULARY_SIZE, CONTEXT_TOKENS)
        models = dumps([{"tokenizer_dir": directory, "name": MODEL}])
        port = free_port()
        settings = (f"scheduler={scheduler}", f"server.port={port}", f"models={models}")
        command = ["gateway", *(part for setting in settings for part in ("--set", setting))]
        async with _listening(log, port, command) as started:
            yield started


def _started(log: Path, module: str, *arguments: str) -> AbstractAsyncContextManager[tuple[str, int]]:
    """Run `python -m module PORT arguments`; its endpoint and process id once it listens."""
    port = free_port()
    return _listening(log, port, [module, str(port), *arguments])


@asynccontextmanager
async def _listening(log: Path, port: int, module: list[str]) -> AsyncIterator[tuple[str, int]]:
    with log.open("a") as output:
        command = [sys.executable, "-m", *module]
        child = Child(module[0].removeprefix("bench."), command, LinePrinter(LABEL_WIDTH, output))
        try:
            await child.start()
            async with Channels().open(f"{HOST}:{port}") as channel, asyncio.timeout(READY_SECONDS):
                await channel.channel_ready()
            yield f"{HOST}:{port}", child.process_id
        finally:
            await child.stop(STOP_SECONDS)
