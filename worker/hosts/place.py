"""Finds out which of its worker's hosts a service runs on, from the variables that torchrun or a LeaderWorkerSet
sets.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from mesh.addresses import is_loopback, with_port
from mesh.errors import ConfigError
from transfer.network import ALL_DEVICES, devices_of
from worker.config import WorkerConfig

ConfigT = TypeVar("ConfigT", bound=WorkerConfig)


@dataclass(frozen=True, slots=True)
class Variables:
    number: str
    hosts: str
    first: str


LEADER_WORKER_SET = Variables("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS")
TORCHRUN = Variables("RANK", "WORLD_SIZE", "MASTER_ADDR")
# Replaces RANK if the launcher sets it instead.
NODE_RANK = "NODE_RANK"
# How many services torchrun starts on each host.
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
# The network devices on which gloo and NCCL listen.
NETWORK_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True, slots=True)
class HostPlace:
    """number: of the host, counted from 0, the worker's first; first: host:port of the first host's service, None if
    there is only one host.
    """

    number: int = 0
    first: str | None = None


def find_host(config: ConfigT, variables: Mapping[str, str]) -> tuple[HostPlace, ConfigT]:
    """The place of the service with this configuration and environment, and the configuration to run with. Services of
    several hosts share one worker's id, by default the first host's address. Their ranks' torch.distributed listens
    where gRPC listens, unless the variables say otherwise. Raises ConfigError.
    """
    if config.engine.parallel.hosts == 1:
        return HostPlace(), config
    place = _find_place(config, variables)
    _keep_to_network(config.server.host)
    return place, config if config.worker_id is not None else config.model_copy(update={"worker_id": place.first})


def _find_place(config: WorkerConfig, variables: Mapping[str, str]) -> HostPlace:
    hosts = config.engine.parallel.hosts
    names = LEADER_WORKER_SET if LEADER_WORKER_SET.hosts in variables else TORCHRUN
    if names is TORCHRUN and TORCHRUN.number not in variables:
        names = Variables(NODE_RANK, TORCHRUN.hosts, TORCHRUN.first)
    for name in (names.hosts, names.number, names.first):
        if name not in variables:
            raise ConfigError(
                f"engine.parallel.hosts={hosts}, and {name} is not set: start one service on each host with torchrun"
                " --nproc-per-node 1, as a LeaderWorkerSet, or with RANK, WORLD_SIZE and MASTER_ADDR"
            )
    if variables.get(LOCAL_WORLD_SIZE, "1") != "1":
        raise ConfigError(
            f"{LOCAL_WORLD_SIZE} is {variables[LOCAL_WORLD_SIZE]}: each host has one service, which starts its ranks by"
            " itself (torchrun --nproc-per-node 1)"
        )
    if _number(variables, names.hosts) != hosts:
        raise ConfigError(f"engine.parallel.hosts={hosts}, and {names.hosts} is {variables[names.hosts]}")
    number = _number(variables, names.number)
    if number >= hosts:
        raise ConfigError(f"{names.number} is {number}: the {hosts} hosts are counted from 0")
    if not config.server.port:
        raise ConfigError("engine.parallel.hosts needs a server.port that is not 0: the same one on every host")
    first = variables[names.first]
    if not is_loopback(first) and config.security.tls is None and not config.security.plaintext:
        raise ConfigError(
            f"{names.first}={first} is not loopback: set security.tls, or security.plaintext=true where the network"
            " is protected by other means"
        )
    return HostPlace(number, with_port(first, config.server.port))


def _keep_to_network(host: str) -> None:
    device = devices_of(host)
    if device != ALL_DEVICES:
        for name in NETWORK_VARIABLES:
            os.environ.setdefault(name, device)


def _number(variables: Mapping[str, str], name: str) -> int:
    try:
        number = int(variables[name])
    except ValueError:
        number = -1
    if number < 0:
        raise ConfigError(f"{name}={variables[name]!r} is no number from 0 on")
    return number
