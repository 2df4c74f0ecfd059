"""What a worker is configured as while it serves with fewer hosts than it has."""

from typing import TypeVar

from worker.config import WorkerConfig

ConfigT = TypeVar("ConfigT", bound=WorkerConfig)


def on_hosts(config: ConfigT, hosts: int) -> ConfigT:
    """The configuration on that many of the worker's hosts. Each rank then holds more experts than with all hosts."""
    engine = config.engine
    if hosts == engine.parallel.hosts:
        return config
    # The file's placement is for all hosts.
    balance = engine.balance.model_copy(update={"placement_file": None})
    changed = {"parallel": engine.parallel.on_hosts(hosts), "balance": balance}
    return config.model_copy(update={"engine": engine.model_copy(update=changed)})
