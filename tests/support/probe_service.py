"""`python -m tests.support.probe_service`: does nothing but be ready, or fail as its configuration says."""

import asyncio
import os
import sys
from pathlib import Path

from mesh.config import ServiceConfig
from mesh.errors import CheckpointError, NoWorker
from mesh.launch import launch
from mesh.server import MeshServer


class ProbeConfig(ServiceConfig):
    # Ends before it is ready: "useless" to start again, or "later" with better luck.
    fail: str | None = None
    # As `fail`, but only while this file is there.
    fail_while: Path | None = None
    # Seconds after which it is ready.
    ready_after: float = 0.0
    # Appended to at every start: the process id.
    log: Path | None = None


async def serve(config: ProbeConfig) -> None:
    if config.log is not None:
        with config.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
    if config.fail == "useless":
        raise CheckpointError("the checkpoint is broken: fetch it again")
    if config.fail == "later" or (config.fail_while is not None and config.fail_while.exists()):
        raise NoWorker("not now: try again")
    async with MeshServer(config.server, "probe", []) as server:
        await asyncio.sleep(config.ready_after)
        await server.ready()
        await server.until_signal()


if __name__ == "__main__":
    sys.exit(launch("probe", ProbeConfig, serve))
