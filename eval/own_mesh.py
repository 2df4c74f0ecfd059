"""A mesh of its own for one evaluation."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path

from launcher.composition import compose
from launcher.logged_mesh import logged_mesh
from launcher.plan import HOST, MeshPlan
from launcher.preflight import check_plan
from launcher.serving import until_served
from mesh.ports import free_port
from mesh.rpc.channel import Channels


@asynccontextmanager
async def own_mesh(model_dir: Path, settings: tuple[str, ...], log: Path) -> AsyncIterator[MeshPlan]:
    """Serve a checkpoint on free ports within the block; the processes' lines go to `log`.

    Raises CheckpointError, ConfigError, or ProcessFailed if a process does not get ready.
    """
    plan = MeshPlan(model_dir, 1, free_port(), free_port(), free_port(), settings)
    check_plan(plan)
    specs = compose(plan)
    channels = Channels()
    async with logged_mesh(specs, log, channels):
        await until_served(grpc_endpoint(plan), plan.decode_workers, channels)
        yield plan


def grpc_endpoint(plan: MeshPlan) -> str:
    return f"{HOST}:{plan.grpc_port}"


def http_url(plan: MeshPlan) -> str:
    return f"http://{HOST}:{plan.http_port}/v1"


def files_digest(directory: Path) -> str:
    """A digest of names, sizes and times, which changes when a file of the checkpoint is written. It reads no
    content.
    """
    digest = blake2b(digest_size=8)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            status = path.stat()
            digest.update(f"{path.relative_to(directory)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()
