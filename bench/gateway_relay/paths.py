"""The three ways from a source of tokens to the client: straight, through a bare relay, through a mesh."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.gateway_relay.step_clock import engine_steps, source_steps
from bench.meshes.oracle_mesh import oracle_mesh
from bench.meshes.processes import pin
from cli.launcher.composition import HOST
from cli.launcher.log_lines import LinePrinter
from cli.launcher.process import Child
from mesh.channel import Channels
from mesh.ports import free_port

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
    # Opens the stream that tells when this path's tokens were made.
    steps: Callable[[], AbstractAsyncContextManager[list[float]]]
    # Whether a token's time is known by its arrival, one hop later, and not by its content.
    steps_one_hop_late: bool = False


@asynccontextmanager
async def token_paths(log: Path, streams: int, pace_ms: float) -> AsyncIterator[list[TokenPath]]:
    """Everything started, and each process on its cores: relay and gateway on the first that this process may use,
    the rest, and the client, on the others. A pace of 0 is as fast as it goes."""
    cores = sorted(os.sched_getaffinity(0))
    # What is started from here on inherits this.
    os.sched_setaffinity(0, set(cores[1:] or cores))
    try:
        async with AsyncExitStack() as stack:
            source_at, source = await stack.enter_async_context(_bare(log, f"{PACKAGE}.token_source", str(pace_ms)))
            relay_at, relay = await stack.enter_async_context(_bare(log, f"{PACKAGE}.relay", source_at))
            settings = (f"decode.engine.max_requests={streams + 8}", f"decode.engine.oracle.step_ms={pace_ms}")
            mesh = await stack.enter_async_context(oracle_mesh(log, settings))
            for subject in (relay, mesh.process_ids["gateway"]):
                pin(subject, {cores[0]})
            yield [
                TokenPath("direct", source_at, {"source": source}, lambda: source_steps(source_at)),
                TokenPath("relay", relay_at, {"relay": relay, "source": source}, lambda: source_steps(source_at)),
                TokenPath("gateway", mesh.gateway, mesh.process_ids, lambda: engine_steps(mesh.decode), True),
            ]
    finally:
        os.sched_setaffinity(0, set(cores))


@asynccontextmanager
async def _bare(log: Path, module: str, argument: str) -> AsyncIterator[tuple[str, int]]:
    """Run `python -m module PORT argument`; its endpoint and process id once it listens."""
    port = free_port()
    with log.open("a") as output:
        command = [sys.executable, "-m", module, str(port), argument]
        child = Child(module.removeprefix("bench."), command, LinePrinter(LABEL_WIDTH, output))
        try:
            await child.start()
            async with Channels().open(f"{HOST}:{port}") as channel, asyncio.timeout(READY_SECONDS):
                await channel.channel_ready()
            yield f"{HOST}:{port}", child.process_id
        finally:
            await child.stop(STOP_SECONDS)
