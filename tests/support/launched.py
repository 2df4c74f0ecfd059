"""`deepmesh up` as a user runs it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil

from mesh.ports import free_port
from tests.support.programs import ROOT
from tests.support.waiting import eventually

DEEPMESH = "import sys; from cli.main import main; sys.argv[0] = 'deepmesh'; main()"


class Running:
    """A running `deepmesh` command: its lines so far and its processes."""

    def __init__(
        self, process: asyncio.subprocess.Process, http_port: int, grpc_port: int, scheduler_port: int
    ) -> None:
        self.process = process
        self.http_port = http_port
        self.gateway = f"127.0.0.1:{grpc_port}"
        self.scheduler = f"127.0.0.1:{scheduler_port}"
        self.lines: list[str] = []
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())

    async def until_said(self, text: str, seconds: float = 60) -> None:
        await eventually(lambda: self.said(text) or self.reading.done(), seconds)
        assert self.said(text), "\n".join(self.lines)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def descendants(self) -> dict[int, str]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return {each.pid: " ".join(each.cmdline()) for each in found}

    def of_module(self, module: str) -> int:
        return next(number for number, command in self.descendants().items() if f"-m {module}" in command)


@asynccontextmanager
async def up(*arguments: str) -> AsyncIterator[Running]:
    """Run `deepmesh up` on free ports. It is killed at the end if it still runs."""
    http_port, grpc_port, scheduler_port = free_port(), free_port(), free_port()
    ports = ("--http-port", str(http_port), "--grpc-port", str(grpc_port), "--scheduler-port", str(scheduler_port))
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", DEEPMESH, "up", *ports, "--metrics-port", "0", *arguments],
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    running = Running(process, http_port, grpc_port, scheduler_port)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await running.reading
