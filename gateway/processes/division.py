"""From the configuration of a gateway to that of each of its processes."""

import atexit
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import SecretStr

from gateway.config import GatewayConfig
from gateway.processes.keeper import Keeper
from gateway.processes.ledger import Ledger
from gateway.processes.shared_directory import SharedDirectory
from gateway.processes.siblings import Siblings
from mesh.errors import ConfigError
from mesh.identity import PROCESS_SEPARATOR
from mesh.ports import why_not


class Division:
    """Which of a gateway's processes this is, and what it shares with the others; all of it, unless there are several.

    They share the ports (the kernel deals connections out), the allowances of tenants, and the secret that seals
    streams. Each has its own part of `limits.live_generations`, an id of its own, and a link to each worker and
    scheduler.
    """

    def __init__(self) -> None:
        self.processes = 1
        self.ledger: Ledger
        self._number = 0
        # None where there is one process.
        self._directory: SharedDirectory | None = None
        # They hold ports for the processes, and listen to none.
        self._reserved: list[socket.socket] = []

    def divide(self, config: GatewayConfig) -> GatewayConfig:
        """The configuration of this process. Where there are several, returns in each of them, and the process that
        called it keeps them running. Raises ConfigError for a port that cannot be had.
        """
        self.processes = config.processes
        self.ledger = Ledger([key.name for key in config.api_keys], self.processes)
        if self.processes == 1:
            return config
        config = self._with_ports(config)
        if config.resume.secret is None:
            secret = SecretStr(secrets.token_hex(32))
            config = config.model_copy(update={"resume": config.resume.model_copy(update={"secret": secret})})
        self._directory = SharedDirectory()
        atexit.register(self._directory.remove)
        self._number = self.ledger.process = Keeper(self.processes, self.ledger.forget).run()
        return self._part(config)

    @asynccontextmanager
    async def siblings(self) -> AsyncIterator[Siblings | None]:
        """For the length of the block, what the processes tell each other; None if there is one."""
        if self._directory is None:
            yield None
            return
        async with Siblings(self._directory.path, self._number, self.processes) as siblings:
            yield siblings

    def _part(self, config: GatewayConfig) -> GatewayConfig:
        number, limits = self._number, config.limits
        # The first ones take what is left of the division.
        live = limits.live_generations // self.processes + (number < limits.live_generations % self.processes)
        gateway_id = config.gateway_id or f"{socket.gethostname()}:{config.server.port}"
        return config.model_copy(
            update={
                "gateway_id": f"{gateway_id}{PROCESS_SEPARATOR}{number}",
                "limits": limits.model_copy(update={"live_generations": max(1, live)}),
                # One serves the metrics of all.
                "server": config.server.model_copy(update={"metrics_port": None} if number else {}),
            }
        )

    def _with_ports(self, config: GatewayConfig) -> GatewayConfig:
        """With ports that are held for the processes, where any free one would have done."""
        server = config.server
        ports = {"port": self._reserve("server.port", server.host, server.port)}
        if server.health_port is not None:
            ports["health_port"] = self._reserve("server.health_port", server.host, server.health_port)
        http_port = self._reserve("http.port", config.http.host, config.http.port)
        return config.model_copy(
            update={
                "server": server.model_copy(update=ports),
                "http": config.http.model_copy(update={"port": http_port}),
            }
        )

    def _reserve(self, key: str, host: str, port: int) -> int:
        """Nobody else can listen on the port from here on. Several of ours can."""
        why = why_not(host, port)
        if why is not None:
            raise ConfigError(
                f"gateway cannot listen on {host}:{port} ({why}): stop what uses it or choose another {key}"
            )
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        holder = socket.socket(family, kind, protocol)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(address)
        self._reserved.append(holder)
        return int(holder.getsockname()[1])
