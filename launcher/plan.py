"""The request for a mesh on one machine, and the processes that it consists of: plain data."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launcher.gpus import Gpu
from mesh.addresses import callable_host
from mesh.launch import SETTINGS_VARIABLE

HOST = "127.0.0.1"
HTTP_PORT = 8000
GRPC_PORT = 8001
SCHEDULER_PORT = 8002
METRICS_PORT = 9001
# Offset of the second gateway's ports from the first's.
MORE_PORTS_OFFSET = 10
# Prefix of a setting's key on the command line -> module that runs the service.
MODULES: Mapping[str, str] = {
    "scheduler": "scheduler",
    "kvstore": "kvstore",
    "prefill": "prefill_svc",
    "decode": "decode_svc",
    "gateway": "gateway",
}
WORKER_MODULES = (MODULES["prefill"], MODULES["decode"])
# A setting is secret if its key or value contains one of these, however it is written: kv.secret=TEXT, kv={secret:
# TEXT}.
SECRETS = ("api_keys", "redis_url", "redis_password", "secret")


@dataclass(frozen=True)
class ServiceSpec:
    """One process: `python -m module --set ...`."""

    name: str
    module: str
    # Port of its gRPC and health; None takes a free one at every start.
    port: int | None
    settings: tuple[str, ...]
    # Seconds within which it must be ready; None waits as long as the process lives.
    ready_seconds: float | None
    # Whether it is one of several that do the same work: the mesh continues while another one is left.
    worker: bool = False
    # Whether the mesh is only slower without it.
    optional: bool = False
    # The GPU that it computes on; None is the CPU.
    gpu: Gpu | None = None
    # 0 takes a free one at every start; the service logs it.
    metrics_port: int = 0
    # The host by which it is reached from this machine.
    host: str = HOST

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables to set in addition to the supervisor's."""
        secret = [each for each in self.settings if _is_secret(each)]
        settings = {SETTINGS_VARIABLE: json.dumps(secret)} if secret else {}
        return settings if self.gpu is None else {**settings, **self.gpu.environment}

    def command(self, port: int) -> list[str]:
        """The command line that serves on `port`. Other users of the machine can read it, so it contains no secrets."""
        settings = (f"server.port={port}", f"server.metrics_port={self.metrics_port}", *self.settings)
        shown = [each for each in settings if not _is_secret(each)]
        return [sys.executable, "-P", "-m", self.module, *(part for each in shown for part in ("--set", each))]


@dataclass(frozen=True)
class MeshPlan:
    """What `deepmesh up` was asked for. `settings` are "SERVICE.key=value", where SERVICE is one of MODULES. Without
    `model_dir`, the settings must say what the workers serve.
    """

    model_dir: Path | None
    decode_workers: int = 1
    http_port: int = HTTP_PORT
    grpc_port: int = GRPC_PORT
    scheduler_port: int = SCHEDULER_PORT
    settings: tuple[str, ...] = ()
    # With none, decode workers compute prompts themselves.
    prefill_workers: int = 0
    # One KV store on each port; workers and scheduler know a store by its endpoint.
    store_ports: tuple[int, ...] = ()
    # Names of this machine's GPUs.
    gpus: tuple[str, ...] = ()
    # Address on which the gateway listens for clients; everything else listens on loopback.
    host: str = HOST
    # The gateway's metrics port; the other services' ports follow it (METRICS_OFFSETS). None takes free ones.
    metrics_port: int | None = None
    # Keys of engine.parallel (ranks, tp, dp, ep) by service.
    parallel: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    # Ports of schedulers other than the first.
    more_scheduler_ports: tuple[int, ...] = ()
    gateways: int = 1
    # Secret that seals the names of streams, for all gateways.
    resume_secret: str | None = None
    # Secret with which workers sign the blocks that stores keep.
    kv_secret: str | None = None
    # Clients know the model by this name; None is the folder's.
    model_name: str | None = None

    @property
    def scheduler_endpoints(self) -> list[str]:
        return [f"{HOST}:{port}" for port in (self.scheduler_port, *self.more_scheduler_ports)]

    @property
    def gateway_ports(self) -> list[tuple[int, int]]:
        """HTTP and gRPC port of each gateway."""
        offsets = [number * MORE_PORTS_OFFSET for number in range(self.gateways)]
        return [(self.http_port + offset, self.grpc_port + offset) for offset in offsets]

    @property
    def workers(self) -> int:
        """Number of decode and prefill workers."""
        return self.decode_workers + self.prefill_workers

    @property
    def gateway_host(self) -> str:
        """The host by which the gateway is reached from this machine: "every address" cannot be called."""
        return callable_host(self.host)

    @property
    def store_endpoints(self) -> list[str]:
        return [f"{HOST}:{port}" for port in self.store_ports]


def _is_secret(setting: str) -> bool:
    return any(word in setting for word in SECRETS)
