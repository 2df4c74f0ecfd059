"""Divides the configuration of a gateway among its processes."""

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
from mesh.addresses import with_port
from mesh.errors import ConfigError
from mesh.ports import bound_socket, why_not
from mesh.rpc.identity import PROCESS_SEPARATOR


class Division:
    """This process's number among the gateway's, and what it shares with the others; a single process has all.

    The processes share the ports (the kernel spreads connections over them), the allowances of tenants, and the secret
    that seals streams. Each has its own part of `limits.live_generations`, its own id, and its own link to each worker
    and scheduler.
    """

    def __init__(self) -> None:
        self.processes = 1
        self.ledger: Ledger
        self._number = 0
        # None if there is only one process.
        self._directory: SharedDirectory | None = None
        # Sockets that reserve ports for the processes; no process listens on these sockets.
        self._reserved: list[socket.socket] = []

    def divide(self, config: GatewayConfig) -> GatewayConfig:
        """The configuration of this process. If there are several, the call forks them and returns in each; the calling
        process stays inside it and keeps them running. Raises ConfigError if a port is not available.
        """
        self.processes = config.processes
        self.ledger = Ledger([key.name for key in config.api_keys], self.processes)
        if self.processes == 1:
            return config
        config = self._with_ports(config)
        if config.resume.secret is None:
            secret = SecretStr(secrets.token_hex(32))
            config = config.model_copy(update={"resume": config.resume.model_copy(update={"secret": secret})})
        self._directory = SharedDirectory("deepmesh-gateway-")
        atexit.register(self._directory.remove)
        self._number = self.ledger.process = Keeper(self.processes, self.ledger.forget).run()
        return self._part(config)

    @asynccontextmanager
    async def siblings(self) -> AsyncIterator[Siblings | None]:
        """Yields the link to the other processes for the length of the block; None if there is only one."""
        if self._directory is None:
            yield None
            return
        async with Siblings(self._directory.path, self._number, self.processes) as siblings:
            yield siblings

    def _part(self, config: GatewayConfig) -> GatewayConfig:
        number, limits = self._number, config.limits
        # The first processes get one more each if the limit does not divide evenly.
        live = limits.live_generations // self.processes + (number < limits.live_generations % self.processes)
        gateway_id = config.gateway_id or f"{socket.gethostname()}:{config.server.port}"
        return config.model_copy(
            update={
                "gateway_id": f"{gateway_id}{PROCESS_SEPARATOR}{number}",
                "limits": limits.model_copy(update={"live_generations": max(1, live)}),
                # Only the first process has the metrics port; it serves the metrics of all.
                "server": config.server.model_copy(update={"metrics_port": None} if number else {}),
            }
        )

    def _with_ports(self, config: GatewayConfig) -> GatewayConfig:
        """The configuration, with ports reserved for all processes; a port of 0 is replaced by a free one."""
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
        """Reserve a port: from now on only this gateway's processes can listen on it."""
        why = why_not(host, port)
        if why is not None:
            raise ConfigError(
                f"gateway cannot listen on {with_port(host, port)} ({why}): stop what uses it or choose another {key}"
            )
        holder = bound_socket(host, port, share=True)
        self._reserved.append(holder)
        return int(holder.getsockname()[1])
