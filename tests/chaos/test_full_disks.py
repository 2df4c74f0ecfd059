"""The disks of logs and traces, of a KV store, and of Redis are full. No token is lost, repeated or changed, and
nothing is held afterwards."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from launcher.plan import MODULES, ServiceSpec
from mesh.ports import free_port
from tests.support.chaos import PHASES, ChaosMesh, chaos_mesh, run_cell
from tests.support.launched import DEEPMESH
from tests.support.programs import ROOT
from tests.support.small_disk import SmallDisk, small_disk, why_no_disk
from tests.support.waiting import eventually

SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
FULL_SECONDS = 5.0
pytestmark = [
    pytest.mark.check("chaos"),
    pytest.mark.skipif(why_no_disk() is not None, reason=f"{why_no_disk()}"),
]


@dataclass(frozen=True)
class LoggedSpec(ServiceSpec):
    """A process whose output goes to a file, as under many init systems."""

    directory: str = ""

    def command(self, port: int) -> list[str]:
        into = f'exec "$@" >>{self.directory}/{self.name}.log 2>&1'
        return ["sh", "-c", into, "sh", *super().command(port)]


def logged(directory: Path, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
    names = [each.name for each in fields(ServiceSpec)]
    return [LoggedSpec(**{name: getattr(spec, name) for name in names}, directory=str(directory)) for spec in specs]


async def fill(disk: SmallDisk, chaos: ChaosMesh) -> None:
    disk.fill()
    await asyncio.sleep(FULL_SECONDS)
    disk.free()


async def keep_from_saving(disk: SmallDisk, chaos: ChaosMesh) -> None:
    """Fill Redis' disk, and wait until Redis refuses writes because it could not save."""
    disk.fill()
    async with asyncio.timeout(30), Redis.from_url(chaos.redis.url) as client:
        with pytest.raises(ResponseError, match="MISCONF"):
            while True:
                await client.set("any", "value")
                await asyncio.sleep(0.1)
    await asyncio.sleep(FULL_SECONDS)
    disk.free()


async def restart_on_full_disk(disk: SmallDisk, chaos: ChaosMesh) -> None:
    """Kill the store, so that it is started again on a full disk."""
    disk.fill()
    psutil.Process(chaos.mesh.supervisor.process_ids["kvstore-0"]).kill()
    await asyncio.sleep(FULL_SECONDS)
    disk.free()


async def test_logs_and_traces_have_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "logs", 256 << 20) as disk:
        settings = [f"{service}.observe.log_level=DEBUG" for service in MODULES]
        settings += [f"{service}.observe.trace_file={disk.path}/{service}-%p.json" for service in MODULES]
        async with chaos_mesh(None, *settings, deployed=partial(logged, disk.path)) as chaos:
            for phase in PHASES:
                await run_cell(chaos, "logs full disk", phase, partial(fill, disk), SEED)


async def test_a_store_has_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "blocks", 64 << 20) as disk:
        settings = [f"kvstore.disk.path={disk.path}", "kvstore.disk.bytes=33554432", "kvstore.disk.least_uses=0"]
        async with chaos_mesh(None, *settings) as chaos:
            for phase in PHASES:
                await run_cell(chaos, "kvstore-0 full disk", phase, partial(restart_on_full_disk, disk), SEED)


async def test_redis_has_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "redis", 8 << 20) as disk:
        async with chaos_mesh(redis_directory=disk.path) as chaos:
            for phase in PHASES:
                await run_cell(chaos, "redis full disk", phase, partial(keep_from_saving, disk), SEED)


async def test_the_lines_of_deepmesh_up_have_no_room(tmp_path: Path) -> None:
    port = free_port()
    ports = ["--http-port", str(port), "--grpc-port", str(free_port()), "--scheduler-port", str(free_port())]
    settings = ["--metrics-port", "0", "--set", "gateway.observe.access_log=true"]
    with small_disk(tmp_path / "lines", 1 << 20) as disk, (disk.path / "up.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", DEEPMESH, "up", *ports, *settings], cwd=ROOT, stdout=output, stderr=output
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v1", timeout=60) as client:
                await eventually(lambda: said(disk, "ready: "))
                disk.fill()
                # More lines than the pipe of a process holds.
                for _ in range(1_000):
                    await answered(client)
                disk.free()
                await answered(client)
                await eventually(lambda: said(disk, "lines are lost here: no space left on device"))
        finally:
            process.terminate()
            assert await process.wait() == 0


async def answered(client: httpx.AsyncClient) -> None:
    answer = await client.post("/completions", json={"model": "tiny-r1", "prompt": "1", "max_tokens": 1})
    assert answer.status_code == 200


def said(disk: SmallDisk, text: str) -> bool:
    return text in (disk.path / "up.log").read_text(encoding="utf-8")
