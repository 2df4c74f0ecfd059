"""A whole mesh on the oracle backend, as the processes that `deepmesh up` starts, for benches of the mesh alone."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from tempfile import TemporaryDirectory

from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from launcher.composition import compose
from launcher.logged_mesh import logged_mesh
from launcher.plan import HOST, MeshPlan
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tools.byte_tokenizer import write_tokenizer

MODEL = "oracle"
VOCABULARY_SIZE = 1000
CONTEXT_TOKENS = 131072


@dataclass(frozen=True)
class OracleMesh:
    """Where a running mesh answers, and its processes by name: scheduler, decode-0, gateway."""

    gateway: str
    http: str
    decode: str
    process_ids: dict[str, int]

    @property
    def url(self) -> str:
        return f"http://{self.http}/v1"


@asynccontextmanager
async def oracle_mesh(log: Path, settings: Sequence[str] = ()) -> AsyncIterator[OracleMesh]:
    """Start a mesh, wait until it serves, and stop it at the end; its lines go to `log`.

    The gateway turns the oracle's ids into text, with a tokenizer of its own size. `settings` as `deepmesh up --set`.
    Raises ProcessFailed if a service does not get ready.
    """
    channels = Channels()
    with TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), VOCABULARY_SIZE, CONTEXT_TOKENS)
        models = dumps([{"tokenizer_dir": directory, "name": MODEL}])
        oracle = f"decode.engine.oracle.vocabulary_size={VOCABULARY_SIZE}"
        fixed = ("decode.engine.backend=oracle", oracle, f"gateway.models={models}")
        http_port, grpc_port, scheduler_port = free_port(), free_port(), free_port()
        specs = compose(MeshPlan(None, 1, http_port, grpc_port, scheduler_port, (*fixed, *settings)))
        async with logged_mesh(specs, log, channels, append=True) as supervisor:
            decode = await _decode_endpoint(f"{HOST}:{scheduler_port}", channels)
            yield OracleMesh(f"{HOST}:{grpc_port}", f"{HOST}:{http_port}", decode, supervisor.process_ids)


async def _decode_endpoint(scheduler: str, channels: Channels) -> str:
    """The endpoint of the first worker that registers."""
    async with channels.open(scheduler) as channel:
        watch = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchWorkers(scheduler_pb2.WatchWorkersRequest())
        async for snapshot in watch:
            if snapshot.workers:
                return str(snapshot.workers[0].identity.endpoint)
    raise AssertionError("the scheduler's watch ended")
