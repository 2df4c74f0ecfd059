"""A worker's configuration once every setting that was not given is chosen."""

import logging
from typing import TypeVar

from engine.settings.here import resolve_here
from mesh.domain.workers import WorkerRole
from worker.config import WorkerConfig

ConfigT = TypeVar("ConfigT", bound=WorkerConfig)

_log = logging.getLogger("deepmesh.worker")


def settled(config: ConfigT, role: WorkerRole) -> ConfigT:
    """For the ranks and all that is told of them; a change of role begins with the given configuration again. The
    reasons are logged once. Raises CheckpointError, ConfigError.
    """
    resolved = resolve_here(config.engine, role)
    for choice in resolved.told:
        _log.info(str(choice))
    return config.model_copy(update={"engine": resolved.engine})
