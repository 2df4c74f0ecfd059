"""A worker service as a process of its own, on the oracle backend."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from launcher.process import Child
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tests.support.addresses import NOWHERE
from tests.support.forking import forked_services
from tests.support.waiting import eventually


@dataclass
class WorkerProcess:
    child: Child
    endpoint: str
    lines: list[str]

    @property
    def rank(self) -> psutil.Process:
        (rank,) = psutil.Process(self.child.process_id).children()
        return rank

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.child.process_id, number)

    async def said(self, text: str) -> None:
        """Return once it has logged a line with this text."""
        await eventually(lambda: any(text in line for line in self.lines), 60)

    async def ends_with_its_rank_when_killed(self) -> None:
        await self.child.wait_ready(self.endpoint, Channels(), 90)
        rank = self.rank
        self.signal(signal.SIGKILL)
        await self.child.wait()
        await eventually(lambda: not rank.is_running())

    async def ends_for_good_complaining_of(self, complaint: str) -> None:
        """Wait for status 2, with which it is not started again. The user sees the last line, so check that one."""
        assert await self.child.wait() == 2
        assert complaint in self.lines[-1]


@asynccontextmanager
async def worker_process(module: str, *settings: str, port: int | None = None) -> AsyncIterator[WorkerProcess]:
    """Run `python -m module`, without a scheduler unless `settings` name one. It is stopped at the end."""
    port = port or free_port()
    defaults = ("engine.backend=oracle", f"server.port={port}", f"scheduler={NOWHERE}")
    options = [part for setting in (*defaults, *settings) for part in ("--set", setting)]
    lines: list[str] = []
    child = Child(module, [sys.executable, "-m", module, *options], lambda _, line: lines.append(line))
    with forked_services():
        await child.start()
    try:
        yield WorkerProcess(child, f"127.0.0.1:{port}", lines)
    finally:
        await child.stop(10)
