"""Which processes make a mesh on one machine, and what each is told: plain data from plain data."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh.errors import ConfigError

HOST = "127.0.0.1"
HTTP_PORT = 8000
GRPC_PORT = 8001
SCHEDULER_PORT = 8002
# What is served where no model is named: shipped beside the code.
DEFAULT_MODEL = Path(__file__).parents[1] / "models" / "tiny-r1"
# Prefix of a key on the command line -> module that runs it.
MODULES: Mapping[str, str] = {"scheduler": "scheduler", "decode": "decode_svc", "gateway": "gateway"}
# Workers take as long as their checkpoint does.
READY_SECONDS = 60.0


@dataclass(frozen=True)
class ServiceSpec:
    """One process: `python -m module --set ...`."""

    name: str
    module: str
    # gRPC, with health; None takes a free one at every start.
    port: int | None
    settings: tuple[str, ...]
    # How long it may take to be ready; None waits for as long as it lives.
    ready_seconds: float | None
    # One of several that do the same work.
    worker: bool = False

    def command(self, port: int) -> list[str]:
        """The command line that serves on `port`."""
        # Metrics on any port; the service logs which.
        settings = (f"server.port={port}", "server.metrics_port=0", *self.settings)
        return [sys.executable, "-P", "-m", self.module, *(part for each in settings for part in ("--set", each))]


@dataclass(frozen=True)
class MeshPlan:
    """What `deepmesh up` was asked for. `settings` are "service.key=value", the service being scheduler, decode or
    gateway; without `model_dir` the settings say what the workers serve.
    """

    model_dir: Path | None
    decode_workers: int = 1
    http_port: int = HTTP_PORT
    grpc_port: int = GRPC_PORT
    scheduler_port: int = SCHEDULER_PORT
    settings: tuple[str, ...] = ()


def compose(plan: MeshPlan, cpu_count: int | None = None) -> list[ServiceSpec]:
    """The processes of a mesh, in the order in which they start. Raises ConfigError for a setting of no service."""
    asked = split_settings(plan.settings)
    decode = _decode_settings(plan, cpu_count or os.cpu_count() or 1)
    workers = [
        ServiceSpec(
            f"decode-{number}",
            MODULES["decode"],
            None,
            (*decode, f"worker_id=decode-{number}", *asked["decode"]),
            None,
            worker=True,
        )
        for number in range(plan.decode_workers)
    ]
    return [
        ServiceSpec("scheduler", MODULES["scheduler"], plan.scheduler_port, tuple(asked["scheduler"]), READY_SECONDS),
        *workers,
        ServiceSpec(
            "gateway", MODULES["gateway"], plan.grpc_port, (*_gateway_settings(plan), *asked["gateway"]), READY_SECONDS
        ),
    ]


def split_settings(settings: Sequence[str]) -> dict[str, list[str]]:
    """ "decode.engine.max_requests=8" under "decode", without the prefix; every service has an entry."""
    split: dict[str, list[str]] = {service: [] for service in MODULES}
    for setting in settings:
        service, dot, rest = setting.partition(".")
        if service not in split or not dot or "=" not in rest:
            raise ConfigError(f"--set {setting}: expected SERVICE.KEY=VALUE, the service being {', '.join(split)}")
        split[service].append(rest)
    return split


def _gateway_settings(plan: MeshPlan) -> list[str]:
    settings = [f"http.port={plan.http_port}", f"scheduler={HOST}:{plan.scheduler_port}"]
    if plan.model_dir is not None:
        # JSON is YAML, and quotes whatever a path may hold.
        settings.append("models=" + json.dumps([{"tokenizer_dir": str(plan.model_dir.resolve())}]))
    return settings


def _decode_settings(plan: MeshPlan, cpu_count: int) -> list[str]:
    settings = [f"scheduler={HOST}:{plan.scheduler_port}"]
    if plan.model_dir is not None:
        settings.append("engine.model_dir=" + json.dumps(str(plan.model_dir.resolve())))
    if plan.decode_workers > 1:
        # Each would take every core otherwise.
        settings.append(f"engine.threads={max(1, cpu_count // plan.decode_workers)}")
    return settings
