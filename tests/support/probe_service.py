"""`python -m tests.support.probe_service`: a service that only gets ready, or fails as its configuration says."""

import asyncio
import os
import sys
from pathlib import Path

from mesh.config import ServiceConfig
from mesh.errors import CheckpointError, NoWorker
from mesh.launch import launch
from mesh.rpc.server import MeshServer


class ProbeConfig(ServiceConfig):
    # It ends before it is ready. "useless": starting it again cannot help; "later": starting it again may help.
    fail: str | None = None
    # `fail` applies only while this file exists; "later" if there is none.
    fail_while: Path | None = None
    # Seconds after which it is ready.
    ready_after: float = 0.0
    # A file to which every start appends its process id.
    log: Path | None = None


async def serve(config: ProbeConfig) -> None:
    if config.log is not None:
        with config.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
    fail = config.fail
    if config.fail_while is not None:
        fail = (fail or "later") if config.fail_while.exists() else None
    if fail == "useless":
        raise CheckpointError("the checkpoint is broken: fetch it again")
    if fail == "later":
        raise NoWorker("not now: try again")
    async with MeshServer(config.server, "probe", []) as server:
        await asyncio.sleep(config.ready_after)
        await server.ready()
        await server.until_signal()


if __name__ == "__main__":
    sys.exit(launch("probe", ProbeConfig, serve))
