"""An HTTP server on the event loop of the gateway."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import ASGIApp

from gateway.config import HttpConfig
from gateway.openai.connections import ConnectionLimits, LimitedConfig, LimitedConnection
from mesh.addresses import with_port
from mesh.errors import ConfigError
from mesh.ports import bound_socket
from mesh.processes.open_files import connections

BACKLOG = 2048
# As many bodies of the largest size may arrive at once.
ARRIVING_BODIES = 64
# How long requests may take to end once their connections were closed.
END_SECONDS = 1.0


class _Server(uvicorn.Server):
    """Stops at once; uvicorn's own server checks for a stop every tenth of a second and then waits another tenth."""

    def __init__(self, config: LimitedConfig) -> None:
        super().__init__(config)
        self._told = asyncio.Event()
        self._lost = config.lost

    def stop(self) -> None:
        self.should_exit = True
        self._told.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: it calls `stop`."""
        yield

    async def main_loop(self) -> None:
        # A tick updates the date header of answers.
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._told.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections:
                    self._lost.clear()
                    await self._lost.wait()
                while state.tasks:
                    await asyncio.wait(state.tasks)
        except TimeoutError:
            for connection in list(state.connections):
                assert isinstance(connection, LimitedConnection)
                connection.cut_off()
            # Most notice that their clients are gone; of one that is cancelled uvicorn logs a traceback.
            if state.tasks:
                await asyncio.wait(state.tasks, timeout=END_SECONDS)
            for task in state.tasks:
                task.cancel()


class HttpServer:
    """`async with HttpServer(config, application, ...) as server:` listens until the block ends.

    Raises ConfigError if the server cannot listen on the port. The end of the block waits up to `drain_seconds` for
    open responses. A connection whose client reads nothing for `stalled_seconds` is closed.
    """

    def __init__(
        self,
        config: HttpConfig,
        application: ASGIApp,
        *,
        drain_seconds: float,
        stalled_seconds: float,
        share_port: bool = False,
    ) -> None:
        """share_port: whether other processes of this gateway listen on the port too."""
        self.port = 0
        self._share_port = share_port
        self._config = config
        self._stalled_seconds = stalled_seconds
        self._server = _Server(
            LimitedConfig(
                application,
                ConnectionLimits(
                    connections=config.connections or connections(eighths=6),
                    header_seconds=config.header_seconds,
                    body_bytes=config.body_bytes,
                    arriving_bytes=ARRIVING_BODIES * config.body_bytes,
                ),
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                server_header=False,
                timeout_keep_alive=config.keep_alive_seconds,
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
            )
        )

    async def __aenter__(self) -> Self:
        listener = _listen(self._config.host, self._config.port, self._share_port)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Connections inherit this option. If no client reads a full connection, only the system can close it.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._stalled_seconds))
        self.port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
        await self._task


def _listen(host: str, port: int, share: bool) -> socket.socket:
    listener = None
    try:
        listener = bound_socket(host, port, share=share)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        why = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"gateway cannot listen on {with_port(host, port)} for HTTP ({why}):"
            " stop what uses it or choose another http.port"
        ) from error
    return listener
