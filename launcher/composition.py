"""Which processes make a mesh on one machine, and the settings of each. Pure: plain data from plain data."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from launcher.gpus import Gpu
from launcher.plan import HOST, MODULES, WORKER_MODULES, MeshPlan, ServiceSpec
from launcher.workers import worker_specs
from mesh.config_keys import did_you_mean
from mesh.errors import ConfigError

# The default of kvstore.memory_share, which the stores of one machine divide among them.
STORES_MEMORY = 0.25
# Offset of each service's first metrics port from the gateway's.
METRICS_OFFSETS: Mapping[str, int] = {"gateway": 0, "scheduler": 1, "kvstore": 10, "prefill": 100, "decode": 200}
# The same for the second gateway and scheduler.
MORE_METRICS_OFFSETS: Mapping[str, int] = {"gateway": 30, "scheduler": 40}
# Only for services that load no checkpoint. Workers have no limit, and neither have gateways, which are ready once a
# worker is.
READY_SECONDS = 60.0
# How long a gateway keeps requests whose workers are lost, if workers compute on GPUs: a lost one is started again, and
# its start takes 11 s (Moonlight, warm) to 98 s (DeepSeek-R1 on four GPUs).
GPU_WORKER_SECONDS = 120.0


def compose(plan: MeshPlan, cpu_count: int | None = None) -> list[ServiceSpec]:
    """The processes of a mesh, in their starting order. Raises ConfigError for a setting that belongs to no service."""
    asked = split_settings(plan.settings)
    stores = _stores_setting(plan)
    workers = worker_specs(plan, asked, stores, cpu_count or os.cpu_count() or 1)
    patience = [f"dispatch.worker_seconds={GPU_WORKER_SECONDS:g}"] if any(spec.gpu for spec in workers) else []
    specs = [
        *_schedulers(plan, (*stores, *asked["scheduler"])),
        *(_store(plan, number, asked["kvstore"]) for number in range(len(plan.store_ports))),
        *workers,
        *_gateways(plan, (*patience, *asked["gateway"])),
    ]
    return [replace(spec, metrics_port=_metrics_port(plan, spec.name)) for spec in specs]


def device_list(specs: Sequence[ServiceSpec]) -> str:
    """The device of each worker, in words."""
    workers = [spec for spec in specs if spec.module in WORKER_MODULES]
    return ", ".join(f"{spec.name} on {_device(spec.gpu)}" for spec in workers)


def idle_gpus(plan: MeshPlan, specs: Sequence[ServiceSpec]) -> str | None:
    """What to say of GPUs that no worker computes on; None if there are none."""
    used = {name for spec in specs if spec.gpu is not None for name in spec.gpu.own}
    found = len(plan.gpus)
    if not used or len(used) == found:
        return None
    return f"{len(used)} of {found} GPUs serve the model, which needs no more: --gpus {found} divides it among all"


def split_settings(settings: Sequence[str]) -> dict[str, list[str]]:
    """Settings by service: "decode.engine.max_requests=8" is listed under "decode", without the prefix.

    Every service has an entry. Raises ConfigError for a setting that belongs to no service.
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
    """The first process keeps the service's name; others have a number appended."""
    return f"{service}-{number}" if number else service


def _store(plan: MeshPlan, number: int, asked: Sequence[str]) -> ServiceSpec:
    name, stores = f"kvstore-{number}", len(plan.store_ports)
    # Together the stores take what one takes by default.
    share = [f"memory_share={STORES_MEMORY / stores:.3f}"] if stores > 1 else []
    settings = (f"store_id={name}", *share, *asked)
    return ServiceSpec(name, MODULES["kvstore"], plan.store_ports[number], settings, READY_SECONDS, optional=True)


def _stores_setting(plan: MeshPlan) -> list[str]:
    return ["stores=" + json.dumps(plan.store_endpoints)] if plan.store_ports else []


def _gateway_settings(plan: MeshPlan, http_port: int) -> list[str]:
    # No load balancer is in front of this gateway, and whoever stops the mesh does not wait for answers.
    stopping = ["balancer_seconds=0", "server.drain_seconds=1"]
    settings = [f"http.port={http_port}", f"scheduler={','.join(plan.scheduler_endpoints)}", *stopping]
    if plan.host != HOST:
        settings += [f"http.host={plan.host}", f"server.host={plan.host}", f"server.metrics_host={HOST}"]
    if plan.resume_secret is not None:
        settings.append(f"resume.secret={plan.resume_secret}")
    if plan.model_dir is not None:
        # JSON is YAML, and quotes any character that a path may have.
        name = {} if plan.model_name is None else {"name": plan.model_name}
        settings.append("models=" + json.dumps([{"tokenizer_dir": str(plan.model_dir.resolve()), **name}]))
    return settings


def _metrics_port(plan: MeshPlan, name: str) -> int:
    """The process's metrics port; 0 if any free one will do."""
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
