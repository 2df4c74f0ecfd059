"""The gRPC server of every service: health, reflection, the edge interceptor, metrics, and an orderly stop."""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from mesh.addresses import with_port
from mesh.config import ServerConfig
from mesh.errors import ConfigError
from mesh.observe.metrics_http import MetricsServer
from mesh.ports import why_not
from mesh.probe import LIVENESS, READINESS
from mesh.processes.open_files import connections as connections_of_files
from mesh.processes.signals import until_signal
from mesh.rpc.identity import Role
from mesh.rpc.interceptors import EdgeInterceptor
from mesh.rpc.keepalive import CLIENTS_KEEPALIVE, KEEPALIVE, SHORTEST_PING_INTERVAL_MS
from mesh.tls import ServerTls

ANY_ADDRESS = ("0.0.0.0", "::")

# Calls that may wait for their handler to start; they wait only as long as it takes to refuse them. Each takes 12 KB,
# also once its client has reset its stream: one that began and reset streams as fast as it could (CVE-2023-44487)
# filled 1.2 GB a second.
MAX_PENDING_CALLS = 16_384
# Streams of one connection: fewer, so that none takes all places. The server refuses those beyond.
MAX_STREAMS = 10_240
# How long they may wait: a day, since their own deadlines end them earlier.
MAX_PENDING_SECONDS = 86_400

# By default gRPC keeps a connection whose TLS handshake does not end for two minutes.
HANDSHAKE_MS = 10_000

# How long a stopping server takes to flush what calls have written, once they have ended.
FLUSH_SECONDS = 1.0
# Longer than any call: a stop of gRPC's server with this grace waits for calls and never cancels them itself.
UNLIMITED_SECONDS = 365.0 * 86_400

_log = logging.getLogger("deepmesh.server")

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass(frozen=True)
class Registration:
    """One gRPC service: `Registration(add_XServicer_to_server, servicer, "deepmesh.v1.XService")`.

    `endless` names the methods whose calls end only with their client ("WatchWorkers"): a stopping server waits for all
    other calls and then ends these with SHUTTING_DOWN. `serves` gives the roles that may call each method; under mutual
    TLS a method that it does not name is refused.
    """

    add: Callable[[Any, grpc.aio.Server], None]
    servicer: Any
    service_name: str
    endless: Collection[str] = ()
    serves: Mapping[str, Collection[Role]] = field(default_factory=dict)


class MeshServer:
    """`async with MeshServer(config, "scheduler", registrations) as server:` listens until the block ends.

    Health answers for `liveness` (SERVING from the start), `readiness` and "" (SERVING between `ready` and `drain`).
    The end of the block drains, waits up to `drain_seconds` for calls, and stops. Raises ConfigError if a port cannot
    be listened on.

    Without `tls` the server uses plaintext and does not authenticate callers. `public`: its callers are clients of the
    mesh rather than services. `share_ports`: other processes of this service listen on the same ports, and each gets a
    part of the connections. `connections`: further ones are closed at once, which their clients see as UNAVAILABLE; by
    default three quarters of the files that the process may open. The port of health has an eighth.
    """

    def __init__(
        self,
        config: ServerConfig,
        name: str,
        registrations: Sequence[Registration],
        tls: ServerTls | None = None,
        *,
        public: bool = False,
        share_ports: bool = False,
        connections: int | None = None,
    ) -> None:
        self.port = 0
        self.metrics_port: int | None = None
        self.health_port: int | None = None
        self._tls = tls
        self._config = config
        self._name = name
        self._share_ports = share_ports
        self._health = HealthServicer()
        endless = [f"/{each.service_name}/{method}" for each in registrations for method in each.endless]
        watch = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/Watch"
        info = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
        serves = _served(registrations) if tls and tls.mutual else None
        self._edge = EdgeInterceptor(config.max_calls, [*endless, watch, info], serves)
        keepalive = CLIENTS_KEEPALIVE if public else KEEPALIVE
        most = connections_of_files(eighths=6) if connections is None else connections
        options = [*_options(config, share_ports, most), *keepalive]
        self._server = grpc.aio.server(interceptors=[self._edge], options=options)
        self._register(registrations)
        self._probed: grpc.aio.Server | None = None
        self._metrics: MetricsServer | None = None

    @property
    def endpoint(self) -> str:
        """host:port at which others reach this server."""
        host = self._config.host
        if host in ANY_ADDRESS:
            # "Every address" cannot be called. The machine's name can, in a container's network and in most others.
            host = socket.gethostname()
        return self._config.advertise or with_port(host, self.port)

    async def __aenter__(self) -> Self:
        credentials = self._tls.credentials if self._tls else None
        self.port = self._listen(self._server, "port", credentials)
        if self._config.metrics_port is not None:
            metrics_host = self._config.metrics_host or self._config.host
            self._metrics = MetricsServer(self._name, metrics_host, self._config.metrics_port)
            self.metrics_port = self._metrics.port
            url = f"http://{with_port(metrics_host, self.metrics_port)}/metrics"
            _log.info("serving metrics", extra={"fields": {"url": url}})
        await self._health.set(LIVENESS, _SERVING)
        await self._set_readiness(_NOT_SERVING)
        await self._serve_probes()
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.drain()
        grace = self._config.drain_seconds if error is None else 0.0
        # From here on new calls are refused, while those in flight may end.
        stopped = asyncio.create_task(self._server.stop(UNLIMITED_SECONDS))
        if await self._edge.finish_calls(grace):
            # The calls left have clients that do not read: they do not get the full grace.
            await asyncio.wait([stopped], timeout=FLUSH_SECONDS)
        if not stopped.done():
            # None cancels the calls at once. With a grace of its own, this stop would cancel them later, and crash the
            # process if the first stop has destroyed gRPC's server by then.
            await self._server.stop(None)
        await stopped
        if self._probed is not None:
            await self._probed.stop(0)
        if self._metrics is not None:
            self._metrics.stop()

    async def ready(self) -> None:
        """Report that the service takes requests."""
        await self._set_readiness(_SERVING)

    async def drain(self) -> None:
        """Report that the service takes no new requests; calls still work."""
        await self._set_readiness(_NOT_SERVING)

    async def until_signal(self) -> None:
        """Return at the first SIGTERM or SIGINT. A second one kills the process."""
        await until_signal()

    async def _serve_probes(self) -> None:
        """Serve health on its own plaintext port."""
        if self._config.health_port is None:
            return
        most = connections_of_files(eighths=1)
        options = [*_options(self._config, self._share_ports, most), *CLIENTS_KEEPALIVE]
        self._probed = grpc.aio.server(options=options)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probed)
        self.health_port = self._listen(self._probed, "health_port", None)
        await self._probed.start()

    async def _set_readiness(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        await self._health.set(READINESS, status)
        await self._health.set("", status)

    def _listen(self, server: grpc.aio.Server, key: str, credentials: grpc.ServerCredentials | None) -> int:
        """Listen on the port that the configuration has under `key`; returns the port."""
        host, port = self._config.host, getattr(self._config, key)
        address = with_port(host, port)
        # Check first, since gRPC prints its own line for a port that is taken. A shared port is never free.
        why = None if self._share_ports else why_not(host, port)
        if why is None:
            try:
                if credentials is None:
                    return server.add_insecure_port(address)
                return server.add_secure_port(address, credentials)
            except RuntimeError as error:
                why = str(error)
        raise ConfigError(
            f"{self._name} cannot listen on {address} ({why}): stop what uses it or choose another server.{key}"
        )

    def _register(self, registrations: Sequence[Registration]) -> None:
        for registration in registrations:
            registration.add(registration.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [each.service_name for each in registrations]
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection([*names, health_name, reflection.SERVICE_NAME], self._server)


def _options(config: ServerConfig, share_ports: bool, connections: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # By default gRPC silently cancels calls beyond 1,000 that wait for a handler. Here every call gets a handler,
        # and the edge refuses those that are too many.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # By default it also cancels those that have waited for 30 s, as happens if thousands come at once to a busy
        # machine.
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
        # Without this, two services that use a port by accident would each get a part of the calls.
        ("grpc.so_reuseport", int(share_ports)),
        ("grpc.http2.min_ping_interval_without_data_ms", SHORTEST_PING_INTERVAL_MS),
    ]


def _served(registrations: Sequence[Registration]) -> dict[str, Collection[Role]]:
    """The roles that each method serves, by "/package.Service/Method"."""
    return {f"/{each.service_name}/{method}": roles for each in registrations for method, roles in each.serves.items()}
