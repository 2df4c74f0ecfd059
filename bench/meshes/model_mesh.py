"""A whole mesh that serves a model, as `deepmesh up` starts it, for benches."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.composition import compose
from launcher.gpus import find_gpus
from launcher.logged_mesh import logged_mesh
from launcher.plan import HOST, MeshPlan
from launcher.serving import until_served
from launcher.shipped_model import shipped_model
from mesh.ports import free_port
from mesh.rpc.channel import Channels

# Prompts are drawn from these ids: byte pairs of the shipped tokenizer, above its special tokens.
FIRST_TOKEN, LAST_TOKEN = 300, 1500


@dataclass(frozen=True)
class ModelMesh:
    """Where a running mesh answers, and its processes by name: decode-0, prefill-0, ..."""

    gateway: str
    scheduler: str
    process_ids: dict[str, int]


@asynccontextmanager
async def model_mesh(
    log: Path,
    *,
    model_dir: Path | None = None,
    prefill: int = 0,
    stores: int = 0,
    settings: Sequence[str] = (),
) -> AsyncIterator[ModelMesh]:
    """One decode worker, `prefill` prefill workers and `stores` KV stores; their lines go to `log`.

    They serve tiny-r1 if `model_dir` is None. `settings` as `deepmesh up --set`. Raises ProcessFailed if a service does
    not get ready.
    """
    store_ports = tuple(free_port() for _ in range(stores))
    http_port, grpc_port, scheduler_port = free_port(), free_port(), free_port()
    asked, gpus = tuple(settings), find_gpus()
    plan = MeshPlan(
        model_dir or shipped_model(), 1, http_port, grpc_port, scheduler_port, asked, prefill, store_ports, gpus
    )
    specs = compose(plan)
    channels = Channels()
    async with logged_mesh(specs, log, channels, append=True) as supervisor:
        await until_served(f"{HOST}:{grpc_port}", plan.decode_workers, channels)
        yield ModelMesh(f"{HOST}:{grpc_port}", f"{HOST}:{scheduler_port}", supervisor.process_ids)
