"""How a worker takes the other role.

It drains, and its process becomes the service of that role, with the ranks it has, or with new ones if the role needs
other weights or other shares of them. The next program is the same process (exec), so the ranks stay its children:
whoever kills it ends them, and a supervisor restarts it in the role that it was configured with.
"""

import asyncio
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from engine.config import EngineConfig
from engine.role_change import check_keeps_weights
from engine.settings.here import resolve_here
from mesh.config import ServiceConfig
from mesh.config_values import overridden
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError, WorkerDraining
from mesh.launch import Program
from mesh.rpc.server import MeshServer
from worker.config import WorkerConfig
from worker.handover import Handover, KeptRanks

MODULES: Mapping[WorkerRole, str] = {WorkerRole.PREFILL: "prefill_svc", WorkerRole.DECODE: "decode_svc"}


class RoleChange:
    """The one change of role that a program can make.

    Attributes:
        wanted: set when the worker must drain and end with the next program.
        drain_seconds: how long its requests may then take to end.
        keeps_ranks: whether the next program takes over the ranks; otherwise they end first.
    """

    def __init__(self, config: WorkerConfig, role: WorkerRole, handover: Handover | None) -> None:
        """role: the worker's present role; handover: what the previous program left."""
        self._config = config
        self._role = role
        self._former = None if handover is None else handover.former_settings
        self._settings: list[str] = []
        self._asked = False
        self.wanted = asyncio.Event()
        self.drain_seconds = config.server.drain_seconds
        self.keeps_ranks = True

    async def begin(
        self, role: WorkerRole, drain_seconds: float | None, own: Sequence[str], may_reload: bool = False
    ) -> None:
        """Check whether the worker can take the role, and begin the change; does nothing if it has the role already.

        own: KEY=VALUE settings for this worker's address and id. may_reload: whether weights may be loaded again if the
        role needs others. Raises ConfigError if the change is impossible, and WorkerDraining if a change is under way.
        """
        if role is self._role:
            return
        if self._config.engine.parallel.hosts > 1:
            raise ConfigError("the ranks of this worker lie on several hosts: start it again with the other role")
        if self._asked:
            raise WorkerDraining("this worker changes its role already")
        self._asked = True
        try:
            self._settings = [*self._settings_of_other_role(), *own]
            await self._check(role, may_reload)
        except BaseException:
            self._asked = False
            raise
        if drain_seconds is not None:
            self.drain_seconds = drain_seconds
        self.wanted.set()

    def program(self, kept: KeptRanks | None, drained_at: float) -> Program:
        """The program that this process is to become. kept: None if the ranks have ended."""
        (other,) = (role for role in WorkerRole if role is not self._role)
        former = settings_of(self._config, type(self._config).model_fields)
        handover = Handover(kept, former, drained_at)
        return Program(MODULES[other], self._settings, handover.leave())

    def _settings_of_other_role(self) -> list[str]:
        if self._former is not None:
            return self._former
        shared = [field for field in WorkerConfig.model_fields if field != "other_role"]
        return [*settings_of(self._config, shared), *self._config.other_role]

    async def _check(self, role: WorkerRole, may_reload: bool) -> None:
        """Load the other service's configuration, in a separate process: no service imports another."""
        program = Program(MODULES[role], self._settings, {})
        process = await asyncio.create_subprocess_exec(
            *program.command("--check"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=program.variables(os.environ),
        )
        try:
            _, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            last = complaint.decode(errors="replace").strip().rsplit("\n", 1)[-1]
            raise ConfigError(f"this worker cannot take the role {role.value}: {last}")
        try:
            wanted = EngineConfig.model_validate(overridden(self._settings)["engine"])
            now = resolve_here(self._config.engine, self._role)
            check_keeps_weights(now.engine, resolve_here(wanted, role).engine)
            self.keeps_ranks = True
        except ConfigError:
            if not may_reload:
                raise
            self.keeps_ranks = False


def ports_of(server: MeshServer) -> list[str]:
    """The ports on which a server listens as KEY=VALUE: the next program must have the same."""
    ports = {"port": server.port, "metrics_port": server.metrics_port, "health_port": server.health_port}
    return [f"server.{key}={port}" for key, port in ports.items() if port is not None]


def settings_of(config: ServiceConfig, fields: Iterable[str]) -> list[str]:
    """These keys of a configuration as KEY=VALUE, including secrets. A key that was not given stays so, since the
    other role may choose another value for it.
    """
    values = config.model_dump(include=set(fields), exclude_unset=True)
    return [f"{key}={json.dumps(value, default=_plain)}" for key, value in values.items()]


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, Path):
        return str(value)
    assert isinstance(value, Enum), type(value)
    return value.value
