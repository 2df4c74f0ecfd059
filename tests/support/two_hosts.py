"""A worker on two hosts. Both services are in the test's process, the ranks in processes of their own."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from engine.config import EngineConfig
from engine.parallel.config import ParallelConfig
from engine.protocol.messages import StepResult
from mesh.config import SecurityConfig, ServerConfig
from mesh.domain.workers import WorkerRole
from mesh.errors import EngineFailed
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer
from mesh.tls import server_tls
from tests.support.addresses import NOWHERE
from tests.support.certificates import certified
from tests.support.engines import Transcript, oracle_config
from worker.config import WorkerConfig
from worker.hosts.first_host_link import serve_host
from worker.hosts.place import HostPlace
from worker.hosts.service import HostsServicer
from worker.ranks.group import RankGroup, RankMessage

WORKER_ID = "decode-1"


def worker_config(
    dp: int = 2, directory: Path | None = None, name: str = WORKER_ID, port: int = 0, **engine: Any
) -> WorkerConfig:
    """The configuration of a decode worker. directory: if given, the worker has a certificate there for `name`."""
    tls = None if directory is None else certified(directory, Role.DECODE, name)
    engine = {"parallel": ParallelConfig(dp=dp, hosts=2), "max_requests": 16, "total_blocks": 200, **engine}
    return WorkerConfig(
        engine=oracle_config(**engine) if "model_dir" not in engine else EngineConfig(device="cpu", **engine),
        scheduler=NOWHERE,
        worker_id=WORKER_ID,
        server=ServerConfig(port=port, drain_seconds=0.1),
        security=SecurityConfig(tls=tls),
    )


@asynccontextmanager
async def first_host(config: WorkerConfig) -> AsyncIterator[tuple[HostsServicer, MeshServer]]:
    servicer = HostsServicer(config, WorkerRole.DECODE)
    tls = server_tls(config.security.tls)
    async with MeshServer(config.server, "decode", [servicer.registration], tls) as server:
        yield servicer, server


async def join(config: WorkerConfig, server: MeshServer, number: int = 1) -> None:
    """Run the service of another host until it ends."""
    await serve_host(config, WorkerRole.DECODE, HostPlace(number, server.endpoint))


@dataclass
class TwoHosts:
    """other: the second host's service; first, port: the first host's, and where it listens, if it is the fixture's;
    running: ends with the error that ended the worker.
    """

    group: RankGroup
    other: "asyncio.Task[None]"
    first: AsyncExitStack = field(default_factory=AsyncExitStack)
    port: int = 0
    transcript: Transcript = field(default_factory=Transcript)
    running: "asyncio.Task[EngineFailed]" = field(init=False)
    ranks: list[psutil.Process] = field(init=False)

    def __post_init__(self) -> None:
        self.running = asyncio.create_task(self.group.run(self._on_message))
        self.ranks = [each for each in psutil.Process().children() if "engine.rank" in each.cmdline()]

    def rank(self, number: int) -> psutil.Process:
        return next(rank for rank in self.ranks if _number(rank) == number)

    def end_kept(self) -> None:
        """End the first host's ranks if the group has left them to a program that does not follow here."""
        if self.group.kept is not None:
            for descriptor in self.group.kept.descriptors:
                os.close(descriptor)
            for each in self.group.kept.ranks:
                process = psutil.Process(each.process_id)
                process.kill()
                process.wait()

    def _on_message(self, rank: int, message: RankMessage) -> None:
        assert isinstance(message, StepResult)
        self.transcript.record(message)


def _number(rank: psutil.Process) -> int:
    line = rank.cmdline()
    return int(line[line.index("engine.rank") + 1])


@asynccontextmanager
async def two_hosts(config: WorkerConfig) -> AsyncIterator[TwoHosts]:
    """Run the worker on both hosts. A test may end the first host's service early by `first.aclose()`."""
    async with AsyncExitStack() as first:
        servicer, server = await first.enter_async_context(first_host(config))
        other = asyncio.create_task(join(config, server))
        await servicer.hosts.wait()
        group = await RankGroup.start(config.engine, hosts=servicer.hosts)
        hosts = TwoHosts(group, other, first, server.port)
        try:
            yield hosts
        finally:
            hosts.running.cancel()
            await group.close(grace_seconds=30.0)
            servicer.hosts.close()
            if hosts.running.done():
                # The first host was lost for the second, which would wait for another.
                other.cancel()
            await asyncio.gather(other, hosts.running, return_exceptions=True)
            hosts.end_kept()
    assert not any(rank.is_running() for rank in hosts.ranks)
