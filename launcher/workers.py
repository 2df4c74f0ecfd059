"""The workers of a mesh: the GPUs that they compute on, and the settings of each. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.gpus import Gpu, assign
from launcher.plan import MODULES, MeshPlan, ServiceSpec
from mesh.config_values import overridden

OTHER_ROLE: Mapping[str, str] = {"prefill": "decode", "decode": "prefill"}
# The key whose subkeys say how many ranks a worker has.
PARALLEL = "engine.parallel"
# The subkeys that say how a worker is divided.
SIZES = ("ranks", "tp", "dp", "ep")


def worker_specs(
    plan: MeshPlan, asked: Mapping[str, Sequence[str]], stores: Sequence[str], cpu_count: int
) -> list[ServiceSpec]:
    """The prefill workers, then the decode workers. `asked`: the user's settings for each service; `stores`: the
    setting that names the KV stores.

    GPUs go to decode workers first, then to prefill workers, one per rank; if there are too few, they are shared.
    """
    gpus = _assign_gpus(plan, asked)
    common = (*_worker_settings(plan, asked, cpu_count), *stores)
    specs = []
    for service, count in (("prefill", plan.prefill_workers), ("decode", plan.decode_workers)):
        role = (*_parallel_settings(plan, service), *_other_role_setting(plan, service, asked))
        for name in _names(service, count):
            own = _own_settings(plan, gpus.get(name))
            specs.append(_worker(service, name, gpus.get(name), (*common, *role, *own, *asked[service])))
    return specs


def _worker(service: str, name: str, gpu: Gpu | None, settings: Sequence[str]) -> ServiceSpec:
    settings = (f"worker_id={name}", *settings)
    # Without prefill workers the decode workers compute prompts.
    return ServiceSpec(name, MODULES[service], None, settings, None, service == "decode", service == "prefill", gpu)


def _names(service: str, workers: int) -> list[str]:
    return [f"{service}-{number}" for number in range(workers)]


def _assign_gpus(plan: MeshPlan, asked: Mapping[str, Sequence[str]]) -> dict[str, Gpu]:
    """The GPU of each worker that has one, by the worker's name."""
    workers = {"decode": plan.decode_workers, "prefill": plan.prefill_workers}
    takers = [service for service in workers if takes_gpu(asked[service])]
    ranks = {name: _ranks(plan, service, asked) for service in takers for name in _names(service, workers[service])}
    return assign(ranks, plan.gpus)


def _ranks(plan: MeshPlan, service: str, asked: Mapping[str, Sequence[str]]) -> int:
    """How many ranks a worker of this service has."""
    # Values that are not numbers are refused later, with the other settings.
    sizes = {key: value for key, value in _parallel(plan, service, asked).items() if isinstance(value, int)}
    return sizes.get("ranks") or sizes.get("tp", 1) * sizes.get("dp", 1)


def _parallel(plan: MeshPlan, service: str, asked: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    return _asked((*_parallel_settings(plan, service), *asked[service]), *PARALLEL.split("."))


def _asked(settings: Sequence[str], *keys: str) -> dict[str, Any]:
    """The values of these settings below `keys`, however they are written: engine.parallel.dp=2, engine={parallel: {dp:
    2}}.

    Raises ConfigError for a setting that is not YAML.
    """
    values: Any = overridden(settings)
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else {}


def _parallel_settings(plan: MeshPlan, service: str) -> list[str]:
    return [f"{PARALLEL}.{key}={value}" for key, value in plan.parallel.get(service, {}).items()]


def _other_role_setting(plan: MeshPlan, service: str, asked: Mapping[str, Sequence[str]]) -> list[str]:
    """The setting `other_role`: a worker that changes its role is configured like the workers of that role."""
    other = OTHER_ROLE[service]
    # If the other role's settings do not mention the layout, this role's layout must not apply.
    undone = _parallel(plan, service, asked).keys() - _parallel(plan, other, asked).keys()
    settings = [f"{PARALLEL}.{key}=null" for key in sorted(undone & set(SIZES))]
    settings += [*_parallel_settings(plan, other), *asked[other]]
    return ["other_role=" + json.dumps(settings)] if settings else []


def takes_gpu(settings: Sequence[str]) -> bool:
    """Whether workers with these settings compute on a GPU if there is one."""
    engine = _asked(settings, "engine")
    return engine.get("device") != "cpu" and engine.get("backend") != "oracle"


def _own_settings(plan: MeshPlan, gpu: Gpu | None) -> list[str]:
    """Settings that depend on the worker's device."""
    return [*_memory_settings(gpu, plan.workers), *_transfer_settings(plan)]


def _memory_settings(gpu: Gpu | None, workers: int) -> list[str]:
    if gpu is not None:
        # Rounded down, so that together the workers do not ask for more than there is.
        return [f"engine.memory_share={1000 // gpu.workers / 1000}"] if gpu.workers > 1 else []
    # Each worker takes its KV pool from the memory that is free when it starts; together they take half of it.
    return [f"engine.kv_memory_fraction={min(0.25, 0.5 / workers):.3f}"] if workers > 1 else []


def _worker_settings(plan: MeshPlan, asked: Mapping[str, Sequence[str]], cpu_count: int) -> list[str]:
    settings = [f"scheduler={','.join(plan.scheduler_endpoints)}"]
    if plan.model_dir is not None:
        settings.append("engine.model_dir=" + json.dumps(str(plan.model_dir.resolve())))
    if plan.model_name is not None:
        settings.append("engine.model_name=" + json.dumps(plan.model_name))
    if plan.kv_secret is not None:
        settings.append(f"kv.secret={plan.kv_secret}")
    if plan.workers > 1:
        # By default each worker would use every core.
        counts = {"decode": plan.decode_workers, "prefill": plan.prefill_workers}
        ranks = sum(count * _ranks(plan, service, asked) for service, count in counts.items())
        settings.append(f"engine.threads={max(1, cpu_count // ranks)}")
    return settings


def _transfer_settings(plan: MeshPlan) -> list[str]:
    return ["engine.transfer={}"] if plan.prefill_workers or plan.store_ports else []
