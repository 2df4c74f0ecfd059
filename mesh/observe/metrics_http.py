"""Prometheus' `/metrics` over HTTP, on a thread of its own."""

from contextlib import suppress
from socket import SHUT_RDWR, socket
from threading import BoundedSemaphore, Timer
from typing import Any

from prometheus_client import start_http_server

from mesh.addresses import with_port
from mesh.errors import ConfigError

# Each connection has a thread until it has sent a request, which a scrape does at once.
REQUEST_SECONDS = 10.0
# Whoever reaches the port may open connections. Further ones are closed at once.
MOST_CONNECTIONS = 64


class MetricsServer:
    """Listens from construction to `stop`; port 0 picks a free one. Raises ConfigError if it cannot listen."""

    def __init__(self, name: str, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"{name} cannot serve metrics on {with_port(host, port)} ({why}): choose another server.metrics_port"
            ) from error
        self._server.RequestHandlerClass = _quiet(self._server.RequestHandlerClass)
        self._room, self._finish_request = BoundedSemaphore(MOST_CONNECTIONS), self._server.finish_request
        self._server.verify_request = self._has_room  # type: ignore[method-assign, assignment]
        self._server.finish_request = self._serve  # type: ignore[method-assign, assignment]
        self.port: int = self._server.server_port

    def _has_room(self, *connection: Any) -> bool:
        return self._room.acquire(blocking=False)

    def _serve(self, connection: socket, address: Any) -> None:
        # If each read had this time, single bytes would keep their connection for days.
        end = Timer(REQUEST_SECONDS, _end, [connection])
        try:
            end.start()
            self._finish_request(connection, address)
        finally:
            end.cancel()
            self._room.release()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _end(connection: socket) -> None:
    with suppress(OSError):
        connection.shutdown(SHUT_RDWR)


def _quiet(handler: Any) -> Any:
    """The handler of connections, but one that writes no traceback of those that are reset, such as a balancer's
    checks.
    """

    class Handler(handler):  # type: ignore[misc]
        def handle(self) -> None:
            with suppress(OSError):
                super().handle()

    return Handler
