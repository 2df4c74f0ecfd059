"""Finds out whether the hosts of a worker would load the same model on the same kind of device."""

import json
from collections.abc import Mapping

# torch.distributed takes this name from here too.
from torch._C._distributed_c10d import Store

from engine.exchange.store import shared
from mesh.errors import CheckpointError, ConfigError


def check_likeness(store: Store, own: int, hosts: int, device: str, model: Mapping[str, object]) -> None:
    """Called by one rank of each host at once, before they exchange anything. own: its host's number; model: what
    config.json says, by key.

    All ranks raise the same error: ConfigError if devices differ, CheckpointError if models do.
    """
    devices = shared(store, "device", own, hosts, device)
    models = shared(store, "model", own, hosts, json.loads(json.dumps(model, default=_plain)))
    for host in range(1, hosts):
        if devices[host] != devices[0]:
            raise ConfigError(
                f"host {host} of the worker computes on {devices[host]}, and host 0 on {devices[0]}: set"
                " engine.device=cuda, so that a host without GPUs says what it lacks"
            )
        for key, ours in models[0].items():
            if models[host][key] != ours:
                raise CheckpointError(
                    f"host {host} of the worker has another model than host 0: its {key} is {models[host][key]}, and"
                    f" not {ours}; all hosts of a worker must have the same checkpoint"
                )


def _plain(value: object) -> object:
    """Sets have no order that processes share."""
    return sorted(map(str, value)) if isinstance(value, frozenset) else str(value)
