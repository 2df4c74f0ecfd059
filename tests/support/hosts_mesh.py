"""A mesh whose worker runs on several hosts, which are addresses of this machine, or sites of a network."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from launcher.plan import ServiceSpec
from mesh.ports import free_port
from tests.support.checkpoints import random_prompt
from tests.support.mesh_requests import tokens_of
from tests.support.network import Network
from tests.support.oracle_model import assert_greedy, load_oracle
from tests.support.process_mesh import ProcessMesh, process_mesh
from tests.support.separated_mesh import WORKER_PORT, SeparatedSpec, separated
from tests.support.waiting import eventually

WORKER = "decode-0"
# The services use the same port on each.
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")


@dataclass(frozen=True)
class HostSpec(SeparatedSpec):
    """A worker's service on one of its hosts; `first`: the first host's address; `gpus`: names of its GPUs."""

    number: int = 0
    hosts: int = 2
    first: str = ADDRESSES[0]
    gpus: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        launcher = {"RANK": str(self.number), "WORLD_SIZE": str(self.hosts), "MASTER_ADDR": self.first}
        # NCCL takes neither peer memory nor shared memory between hosts of unlike names.
        own = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus), "NCCL_HOSTID": self.name} if self.gpus else {}
        return {**super().environment, **launcher, **own}


def on_hosts(
    specs: Sequence[ServiceSpec],
    hosts: int = 2,
    workers: Collection[str] = (WORKER,),
    net: Network | None = None,
    gpus: Sequence[str] = (),
    each: int = 1,
) -> list[ServiceSpec]:
    """The plan with a service of each of these workers on each host. All other services stay unchanged. With a network
    every process is at the site of its name.

    gpus: which ones hosts take in turn, as CUDA_VISIBLE_DEVICES names them; each: how many a host takes.
    """
    deployed: list[ServiceSpec] = []
    for spec in specs if net is None else separated(net, specs):
        if spec.name not in workers:
            deployed.append(spec)
            continue
        names = [spec.name, *(f"{spec.name}-{number}" for number in range(1, hosts))]
        addresses = ADDRESSES if net is None else [net.address(name) for name in names]
        port = free_port() if net is None else WORKER_PORT
        for number, (name, address) in enumerate(zip(names, addresses, strict=False)):
            ours = {
                "name": name,
                "host": address,
                "port": port,
                "settings": (*spec.settings, f"engine.parallel.hosts={hosts}", f"server.host={address}"),
                "prefix": () if net is None else tuple(net.inside(name)),
                "number": number,
                "hosts": hosts,
                "first": addresses[0],
                "gpus": tuple(gpus[(number * each + gpu) % len(gpus)] for gpu in range(each if gpus else 0)),
            }
            deployed.append(HostSpec(**{key.name: getattr(spec, key.name) for key in fields(ServiceSpec)} | ours))
    return deployed


@dataclass
class Host:
    """The processes of one host: its service and that one's ranks."""

    service: psutil.Process
    ranks: list[psutil.Process]

    async def ends(self) -> None:
        """Wait until all have ended. A service that was suspended ends as whatever watches it would have it."""
        await eventually(lambda: not any(rank.is_running() for rank in self.ranks) or self._suspended, 60)
        if self._suspended:
            self.service.kill()
        await eventually(lambda: not any(each.is_running() for each in (self.service, *self.ranks)), 60)

    @property
    def _suspended(self) -> bool:
        return self.service.is_running() and self.service.status() == psutil.STATUS_STOPPED


@dataclass
class Struck:
    """A worker's hosts before one is struck, and its incarnation."""

    hosts: list[Host]
    incarnation: str
    at: float

    @classmethod
    async def of(cls, mesh: ProcessMesh, hosts: int = 2) -> "Struck":
        names = [WORKER, *(f"{WORKER}-{number}" for number in range(1, hosts))]
        services = [psutil.Process(mesh.supervisor.process_ids[name]) for name in names]
        found = [Host(service, service.children()) for service in services]
        assert all(host.ranks for host in found)
        return cls(found, await incarnation_of(mesh) or "", time.monotonic())

    async def noticed(self, mesh: ProcessMesh) -> None:
        """Wait until the worker takes no requests in the incarnation that was struck."""

        async def gone() -> bool:
            return await incarnation_of(mesh) != self.incarnation

        await eventually(gone, 60)

    async def serves_again(self, mesh: ProcessMesh) -> float:
        """Wait until the worker is registered as another incarnation; returns the seconds since it was struck."""

        async def registered() -> bool:
            return await incarnation_of(mesh) not in (None, self.incarnation)

        await eventually(registered, 120)
        return time.monotonic() - self.at

    async def outlive(self, mesh: ProcessMesh, lost: int, strike: Callable[[Host], None]) -> float:
        """Strike a host; see that the others keep their ranks. Returns the seconds until all serve again."""
        strike(self.hosts[lost])
        seconds = await self.serves_again(mesh)
        await self.hosts[lost].ends()
        self.assert_kept(lost)
        return seconds

    async def go_on_without_suspended(self, mesh: ProcessMesh, lost: int) -> float:
        """Stop a host's service; see that the others serve on alone, with their ranks. Returns the seconds."""
        self.hosts[lost].service.suspend()
        seconds = await self.serves_again(mesh)
        await self.hosts[lost].ends()
        self.assert_kept(lost)
        [worker] = await mesh.workers()
        assert len(worker.ranks) == len(self.hosts) - 1
        return seconds

    def assert_kept(self, *lost: int) -> None:
        """All ranks run on, except those of the hosts with these numbers."""
        for number, host in enumerate(self.hosts):
            assert all(rank.is_running() == (number not in lost) for rank in host.ranks), number


async def incarnation_of(mesh: ProcessMesh) -> str | None:
    """None if the worker is not registered."""
    known = {worker.identity.worker_id: worker.identity.incarnation for worker in await mesh.workers()}
    return known.get(WORKER)


async def runs(mesh: ProcessMesh) -> bool:
    """Whether the worker has requests."""
    loads = {worker.identity.worker_id: worker.load.running_requests for worker in await mesh.workers()}
    return loads.get(WORKER, 0) > 0


@asynccontextmanager
async def model_mesh(
    checkpoint: Path, deployed: Callable[[Sequence[ServiceSpec]], Sequence[ServiceSpec]], settings: tuple[str, ...]
) -> AsyncIterator[ProcessMesh]:
    """A mesh of one worker. Answers are under way when the block begins; at its end all are those of transformers."""
    prompts = [random_prompt(length, seed=length) for length in (150, 3, 70)]
    async with process_mesh(checkpoint, settings=settings, deployed=deployed) as mesh:
        asked = [asyncio.create_task(tokens_of(mesh, prompt, 60)) for prompt in prompts]
        await eventually(lambda: runs(mesh), 60)
        yield mesh
        answers = [*await asyncio.gather(*asked), await tokens_of(mesh, prompts[0], 60)]
    reference = load_oracle(checkpoint)
    for prompt, tokens in zip([*prompts, prompts[0]], answers, strict=True):
        assert_greedy(reference, prompt, tokens)
