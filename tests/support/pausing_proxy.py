"""A TCP proxy that can stop forwarding, at all or on its present connections: each end then sees a peer that is
connected but silent.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class PausingProxy:
    """Made by `async with proxy_to(endpoint) as proxy:`. It listens at `proxy.endpoint`. A pause never ends."""

    def __init__(self, upstream: str) -> None:
        self.endpoint = ""
        self._upstream = upstream
        self._paused = False
        # Counts how often all connections were forgotten.
        self._generation = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def pause(self) -> None:
        self._paused = True

    def forget_connections(self) -> None:
        """As a firewall does with the state of idle ones: new connections work, and no end is told."""
        self._generation += 1

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._upstream.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            self._tasks.add(asyncio.create_task(self._forward(source, sink)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        generation = self._generation
        try:
            with suppress(ConnectionError):
                while data := await source.read(65536):
                    if not self._paused and generation == self._generation:
                        sink.write(data)
                        await sink.drain()
        finally:
            sink.close()


@asynccontextmanager
async def proxy_to(endpoint: str) -> AsyncIterator[PausingProxy]:
    proxy = PausingProxy(endpoint)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
