"""What a mesh on one machine is asked to be, and the processes that it consists of: plain data."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cli.launcher.gpus import Gpu
from mesh.launch import SETTINGS_VARIABLE

HOST = "127.0.0.1"
HTTP_PORT = 8000
GRPC_PORT = 8001
SCHEDULER_PORT = 8002
METRICS_PORT = 9001
# How far the ports of the second gateway lie behind those of the first.
MORE_PORTS_OFFSET = 10
# Prefix of a key on the command line -> module that runs it.
MODULES: Mapping[str, str] = {
    "scheduler": "scheduler",
    "kvstore": "kvstore",
    "prefill": "prefill_svc",
    "decode": "decode_svc",
    "gateway": "gateway",
}
WORKER_MODULES = (MODULES["prefill"], MODULES["decode"])
# What a setting with a secret has in its key or value, however it is written: kv.secret=TEXT, kv={secret: TEXT}.
SECRETS = ("api_keys", "redis_url", "redis_password", "secret")


@dataclass(frozen=True)
class ServiceSpec:
    """One process: `python -m module --set ...`."""

    name: str
    module: str
    # Port of its gRPC, with health; None takes a free one at every start.
    port: int | None
    settings: tuple[str, ...]
    # Seconds in which it must be ready; None waits for as long as it lives.
    ready_seconds: float | None
    # One of several that do the same work: the mesh goes on while another one is left.
    worker: bool = False
    # Without it the mesh is only slower.
    optional: bool = False
    # The GPU that it computes on; None is the CPU.
    gpu: Gpu | None = None
    # 0 takes a free one at every start, which the service logs.
    metrics_port: int = 0
    # Where it is reached from this machine.
    host: str = HOST

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its environment has beside the supervisor's."""
        secret = [each for each in self.settings if _is_secret(each)]
        settings = {SETTINGS_VARIABLE: json.dumps(secret)} if secret else {}
        return settings if self.gpu is None else {**settings, **self.gpu.environment}

    def command(self, port: int) -> list[str]:
        """The command line that serves on `port`. Other users of the machine can read it, and so it has no secrets."""
        settings = (f"server.port={port}", f"server.metrics_port={self.metrics_port}", *self.settings)
        shown = [each for each in settings if not _is_secret(each)]
        return [sys.executable, "-P", "-m", self.module, *(part for each in shown for part in ("--set", each))]


@dataclass(frozen=True)
class MeshPlan:
    """What `deepmesh up` was asked for. `settings` are "service.key=value", the service being one of MODULES; without
    `model_dir` the settings say what the workers serve.
    """

    model_dir: Path | None
    decode_workers: int = 1
    http_port: int = HTTP_PORT
    grpc_port: int = GRPC_PORT
    scheduler_port: int = SCHEDULER_PORT
    settings: tuple[str, ...] = ()
    # Without any, decode workers compute prompts themselves.
    prefill_workers: int = 0
    # A KV store on each port; workers and scheduler know a store by its endpoint.
    store_ports: tuple[int, ...] = ()
    # Names of this machine's GPUs.
    gpus: tuple[str, ...] = ()
    # Address on which the gateway listens for clients; everything else is on loopback.
    host: str = HOST
    # The gateway's; the others have theirs after it (METRICS_OFFSETS). None takes free ones.
    metrics_port: int | None = None
    # Keys of engine.parallel (ranks, tp, dp, ep) by service.
    parallel: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # Ports of schedulers beside the first.
    more_scheduler_ports: tuple[int, ...] = ()
    gateways: int = 1
    # Seals the names of streams for all gateways.
    resume_secret: str | None = None
    # With which workers vouch for the blocks that stores keep.
    kv_secret: str | None = None

    @property
    def scheduler_endpoints(self) -> list[str]:
        return [f"{HOST}:{port}" for port in (self.scheduler_port, *self.more_scheduler_ports)]

    @property
    def gateway_ports(self) -> list[tuple[int, int]]:
        """HTTP and gRPC of each gateway."""
        offsets = [number * MORE_PORTS_OFFSET for number in range(self.gateways)]
        return [(self.http_port + offset, self.grpc_port + offset) for offset in offsets]

    @property
    def workers(self) -> int:
        """Number of decode and prefill workers."""
        return self.decode_workers + self.prefill_workers

    @property
    def gateway_host(self) -> str:
        """Where the gateway is reached from this machine: "every address" cannot be called."""
        return HOST if self.host in ("0.0.0.0", "::") else self.host

    @property
    def store_endpoints(self) -> list[str]:
        return [f"{HOST}:{port}" for port in self.store_ports]


def _is_secret(setting: str) -> bool:
    return any(word in setting for word in SECRETS)
