"""Which processes make a mesh on one machine, and the settings of each. Pure: plain data from plain data."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cli.launcher.gpus import Gpu, assign
from mesh.config import overridden
from mesh.config_keys import did_you_mean
from mesh.errors import ConfigError
from mesh.launch import SETTINGS_VARIABLE

HOST = "127.0.0.1"
HTTP_PORT = 8000
GRPC_PORT = 8001
SCHEDULER_PORT = 8002
METRICS_PORT = 9001
# How far a service's first metrics port lies behind the gateway's.
METRICS_OFFSETS: Mapping[str, int] = {"gateway": 0, "scheduler": 1, "kvstore": 10, "prefill": 100, "decode": 200}
# The same of the second gateway and scheduler.
MORE_METRICS_OFFSETS: Mapping[str, int] = {"gateway": 30, "scheduler": 40}
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
OTHER_ROLE: Mapping[str, str] = {"prefill": "decode", "decode": "prefill"}
# Its keys say how many ranks a worker has.
PARALLEL = "engine.parallel"
# Its keys that say how a worker is divided.
SIZES = ("ranks", "tp", "dp", "ep")
# What a setting with a secret has in its key or value, however it is written: kv.secret=TEXT, kv={secret: TEXT}.
SECRETS = ("api_keys", "redis_url", "redis_password", "secret")
# Large, because the host's cost of a segment in GPU memory does not depend on its size.
GPU_SLOT_BYTES = 64 << 20
# For services that load no checkpoint; workers have no limit, nor have gateways, which are ready once a worker is.
READY_SECONDS = 60.0


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


def compose(plan: MeshPlan, cpu_count: int | None = None) -> list[ServiceSpec]:
    """The processes of a mesh, in the order in which they start. Raises ConfigError for a setting of no service.

    GPUs go to decode workers first, then to prefill workers, one a rank; if there are too few they are shared.
    """
    asked = split_settings(plan.settings)
    gpus = _assign_gpus(plan, asked)
    stores = _stores_setting(plan)
    common = (*_worker_settings(plan, asked, cpu_count or os.cpu_count() or 1), *stores)

    def workers(service: str, count: int) -> list[ServiceSpec]:
        devices = [(name, gpus.get(name)) for name in _names(service, count)]
        role = (*_parallel_settings(plan, service), *_other_role_setting(plan, service, asked))
        return [
            _worker(service, name, gpu, (*common, *role, *_own_settings(plan, gpu), *asked[service]))
            for name, gpu in devices
        ]

    specs = [
        *_schedulers(plan, (*stores, *asked["scheduler"])),
        *(_store(number, port, asked["kvstore"]) for number, port in enumerate(plan.store_ports)),
        *workers("prefill", plan.prefill_workers),
        *workers("decode", plan.decode_workers),
        *_gateways(plan, asked["gateway"]),
    ]
    return [replace(spec, metrics_port=_metrics_port(plan, spec.name)) for spec in specs]


def device_list(specs: Sequence[ServiceSpec]) -> str:
    """The device of each worker, in words."""
    workers = [spec for spec in specs if spec.module in WORKER_MODULES]
    return ", ".join(f"{spec.name} on {_device(spec.gpu)}" for spec in workers)


def split_settings(settings: Sequence[str]) -> dict[str, list[str]]:
    """Settings by service: "decode.engine.max_requests=8" stands under "decode", without the prefix.

    Every service has an entry. Raises ConfigError for a setting of no service.
    """
    split: dict[str, list[str]] = {service: [] for service in MODULES}
    for setting in settings:
        service, dot, rest = setting.partition(".")
        if service not in split or not dot or "=" not in rest:
            name = service.partition("=")[0]
            meant = "" if name in split else did_you_mean(name, split)
            raise ConfigError(
                f"--set {setting}: expected SERVICE.KEY=VALUE, the service being {', '.join(split)}{meant}"
            )
        split[service].append(rest)
    return split


def _schedulers(plan: MeshPlan, settings: tuple[str, ...]) -> list[ServiceSpec]:
    ports = (plan.scheduler_port, *plan.more_scheduler_ports)
    several = len(ports) > 1
    return [
        ServiceSpec(_numbered("scheduler", number), MODULES["scheduler"], port, settings, READY_SECONDS, several)
        for number, port in enumerate(ports)
    ]


def _gateways(plan: MeshPlan, asked: Sequence[str]) -> list[ServiceSpec]:
    specs = []
    for number, (http_port, grpc_port) in enumerate(plan.gateway_ports):
        name, several = _numbered("gateway", number), plan.gateways > 1
        settings = (f"gateway_id={name}", *_gateway_settings(plan, http_port), *asked)
        specs.append(
            ServiceSpec(name, MODULES["gateway"], grpc_port, settings, None, worker=several, host=plan.gateway_host)
        )
    return specs


def _numbered(service: str, number: int) -> str:
    """The first keeps the service's name."""
    return f"{service}-{number}" if number else service


def _is_secret(setting: str) -> bool:
    return any(word in setting for word in SECRETS)


def _metrics_port(plan: MeshPlan, name: str) -> int:
    """0 if any will do."""
    service, _, number = name.partition("-")
    if plan.metrics_port is None:
        return 0
    offsets = MORE_METRICS_OFFSETS if number and service in MORE_METRICS_OFFSETS else METRICS_OFFSETS
    return plan.metrics_port + offsets[service] + int(number or 0)


def _device(gpu: Gpu | None) -> str:
    if gpu is None:
        return "the CPU"
    names = f"GPU {gpu.name}" if gpu.ranks == 1 else f"GPUs {', '.join(gpu.own)}"
    return names + (f" (1/{gpu.workers} of it)" if gpu.workers > 1 else "")


def _names(service: str, workers: int) -> list[str]:
    return [f"{service}-{number}" for number in range(workers)]


def _assign_gpus(plan: MeshPlan, asked: Mapping[str, Sequence[str]]) -> dict[str, Gpu]:
    """The GPU of each worker that has one, by the worker's name."""
    workers = {"decode": plan.decode_workers, "prefill": plan.prefill_workers}
    takers = [service for service in workers if _takes_gpu(asked[service])]
    ranks = {name: _ranks(plan, service, asked) for service in takers for name in _names(service, workers[service])}
    return assign(ranks, plan.gpus)


def _ranks(plan: MeshPlan, service: str, asked: Mapping[str, Sequence[str]]) -> int:
    """How many ranks a worker of this service has."""
    # What is no number is refused with the other settings.
    sizes = {key: value for key, value in _parallel(plan, service, asked).items() if isinstance(value, int)}
    return sizes.get("ranks") or sizes.get("tp", 1) * sizes.get("dp", 1)


def _parallel(plan: MeshPlan, service: str, asked: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return _asked((*_parallel_settings(plan, service), *asked[service]), *PARALLEL.split("."))


def _asked(settings: Sequence[str], *keys: str) -> dict[str, Any]:
    """What these settings say below `keys`, however they are written: engine.parallel.dp=2, engine={parallel: {dp: 2}}.

    Raises ConfigError for a setting that is no YAML.
    """
    values: Any = overridden(settings)
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _parallel_settings(plan: MeshPlan, service: str) -> list[str]:
    return [f"{PARALLEL}.{key}={value}" for key, value in plan.parallel.get(service, {}).items()]


def _other_role_setting(plan: MeshPlan, service: str, asked: Mapping[str, Sequence[str]]) -> list[str]:
    """A worker that changes its role is configured as those who have it."""
    other = OTHER_ROLE[service]
    # Where they say nothing of the layout, what this role says does not hold.
    undone = _parallel(plan, service, asked).keys() - _parallel(plan, other, asked).keys()
    settings = [f"{PARALLEL}.{key}=null" for key in sorted(undone & set(SIZES))]
    settings += [*_parallel_settings(plan, other), *asked[other]]
    return ["other_role=" + json.dumps(settings)] if settings else []


def _takes_gpu(settings: Sequence[str]) -> bool:
    """Whether workers with these settings compute on a GPU if there is one."""
    engine = _asked(settings, "engine")
    return engine.get("device") != "cpu" and engine.get("backend") != "oracle"


def _worker(service: str, name: str, gpu: Gpu | None, settings: Sequence[str]) -> ServiceSpec:
    settings = (f"worker_id={name}", *settings)
    # Without prefill workers the decode workers compute prompts.
    return ServiceSpec(name, MODULES[service], None, settings, None, service == "decode", service == "prefill", gpu)


def _own_settings(plan: MeshPlan, gpu: Gpu | None) -> list[str]:
    """Settings that depend on the device of a worker."""
    return [*_memory_settings(gpu, plan.workers), *_transfer_settings(plan, gpu)]


def _memory_settings(gpu: Gpu | None, workers: int) -> list[str]:
    if gpu is not None:
        # Rounded down, so that together they do not ask for more than there is.
        return [f"engine.memory_share={1000 // gpu.workers / 1000}"] if gpu.workers > 1 else []
    # Each takes its KV pool from what is free when it starts: half of it, between them.
    return [f"engine.kv_memory_fraction={min(0.25, 0.5 / workers):.3f}"] if workers > 1 else []


def _store(number: int, port: int, settings: Sequence[str]) -> ServiceSpec:
    name = f"kvstore-{number}"
    return ServiceSpec(name, MODULES["kvstore"], port, (f"store_id={name}", *settings), READY_SECONDS, optional=True)


def _stores_setting(plan: MeshPlan) -> list[str]:
    return ["stores=" + json.dumps(plan.store_endpoints)] if plan.store_ports else []


def _gateway_settings(plan: MeshPlan, http_port: int) -> list[str]:
    # Nobody balances over this gateway, and who stops the mesh does not wait for answers.
    stopping = ["balancer_seconds=0", "server.drain_seconds=1"]
    settings = [f"http.port={http_port}", f"scheduler={','.join(plan.scheduler_endpoints)}", *stopping]
    if plan.host != HOST:
        settings += [f"http.host={plan.host}", f"server.host={plan.host}", f"server.metrics_host={HOST}"]
    if plan.resume_secret is not None:
        settings.append(f"resume.secret={plan.resume_secret}")
    if plan.model_dir is not None:
        # JSON is YAML, and quotes any character that a path may have.
        settings.append("models=" + json.dumps([{"tokenizer_dir": str(plan.model_dir.resolve())}]))
    return settings


def _worker_settings(plan: MeshPlan, asked: Mapping[str, Sequence[str]], cpu_count: int) -> list[str]:
    settings = [f"scheduler={','.join(plan.scheduler_endpoints)}"]
    if plan.model_dir is not None:
        settings.append("engine.model_dir=" + json.dumps(str(plan.model_dir.resolve())))
    if plan.kv_secret is not None:
        settings.append(f"kv.secret={plan.kv_secret}")
    if plan.workers > 1:
        # Otherwise each worker would take every core.
        counts = {"decode": plan.decode_workers, "prefill": plan.prefill_workers}
        ranks = sum(count * _ranks(plan, service, asked) for service, count in counts.items())
        settings.append(f"engine.threads={max(1, cpu_count // ranks)}")
    return settings


def _transfer_settings(plan: MeshPlan, gpu: Gpu | None) -> list[str]:
    if not plan.prefill_workers and not plan.store_ports:
        return []
    transfer = {} if gpu is None else {"slot_bytes": GPU_SLOT_BYTES}
    return ["engine.transfer=" + json.dumps(transfer)]
