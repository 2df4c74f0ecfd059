"""Prometheus' `/metrics` over HTTP, on a thread of its own."""

from prometheus_client import start_http_server

from mesh.addresses import with_port
from mesh.errors import ConfigError


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
        self.port: int = self._server.server_port

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
