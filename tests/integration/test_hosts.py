"""Requests through a worker whose services run on several hosts, while parts of it die (`make check-hosts`)."""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import psutil
import pytest

from engine.oracle.tokens import oracle_tokens
from launcher.plan import ServiceSpec
from mesh.background import background
from mesh.ports import free_port
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.mesh_requests import assert_right, prompt_of, received_bytes, tokens_of, until_stored
from tests.support.network import Network, network, why_no_network
from tests.support.oracle_model import assert_greedy, load_oracle
from tests.support.process_mesh import SLOW_STORE, VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.separated_mesh import WORKER_PORT, SeparatedSpec, separated
from tests.support.waiting import eventually

pytestmark = pytest.mark.check("hosts")
WORKER = "decode-0"
SECOND = f"{WORKER}-1"
# The hosts are addresses of this machine, on which the services use the same port.
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
RANKS = "decode.engine.parallel.dp=4"
SETTINGS = (
    *oracle_settings(**{"oracle.step_ms": 5, "total_blocks": 512}),
    RANKS,
    "scheduler.lease.seconds=2",
    "decode.grace_seconds=2",
)
OF_MODEL = (RANKS, "decode.engine.device=cpu", "decode.engine.total_blocks=128", "scheduler.lease.seconds=2")
ANSWER_TOKENS = 300
AT_ONCE = 40


@dataclass(frozen=True)
class HostSpec(SeparatedSpec):
    """A worker's service on one of its hosts; `first`: the first host's address."""

    number: int = 0
    hosts: int = 2
    first: str = ADDRESSES[0]

    @property
    def environment(self) -> dict[str, str]:
        launcher = {"RANK": str(self.number), "WORLD_SIZE": str(self.hosts), "MASTER_ADDR": self.first}
        return {**super().environment, **launcher}


def on_hosts(
    specs: Sequence[ServiceSpec], hosts: int = 2, workers: Collection[str] = (WORKER,), net: Network | None = None
) -> list[ServiceSpec]:
    """The plan with a service of each of these workers on each host. All other services stay unchanged. With a network
    every process is at the site of its name.
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
            }
            deployed.append(HostSpec(**{each.name: getattr(spec, each.name) for each in fields(ServiceSpec)} | ours))
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
        assert sum(len(host.ranks) for host in found) == 4
        return cls(found, await incarnation_of(mesh) or "", time.monotonic())

    async def serves_again(self, mesh: ProcessMesh) -> float:
        """Wait until the worker is registered as another incarnation; returns the seconds since it was struck."""

        async def registered() -> bool:
            return await incarnation_of(mesh) not in (None, self.incarnation)

        await eventually(registered, 120)
        return time.monotonic() - self.at

    def assert_kept(self, *lost: int) -> None:
        """All ranks run on, except those of the hosts with these numbers."""
        for number, host in enumerate(self.hosts):
            assert all(rank.is_running() == (number not in lost) for rank in host.ranks), number


async def incarnation_of(mesh: ProcessMesh) -> str | None:
    """None if the worker is not registered."""
    known = {worker.identity.worker_id: worker.identity.incarnation for worker in await mesh.workers()}
    return known.get(WORKER)


async def answer(mesh: ProcessMesh, seed: int) -> None:
    prompt = prompt_of(random.Random(seed).choice([20, 100, 300]), seed)
    assert await tokens_of(mesh, prompt, ANSWER_TOKENS) == oracle_tokens(prompt, ANSWER_TOKENS, VOCABULARY)


# The number of the host that is lost, and what happens to it.
STRIKES: dict[str, tuple[int, Callable[[Host], None]]] = {
    "a rank of the second host is killed": (1, lambda host: host.ranks[1].kill()),
    "a rank of the second host is stopped": (1, lambda host: host.ranks[0].suspend()),
    "the second host's service is killed": (1, lambda host: host.service.kill()),
    "the second host's service is stopped": (1, lambda host: host.service.suspend()),
    "a rank of the first host is killed": (0, lambda host: host.ranks[1].kill()),
    "a rank of the first host is stopped": (0, lambda host: host.ranks[0].suspend()),
    "the first host's service is killed": (0, lambda host: host.service.kill()),
}


@asynccontextmanager
async def model_mesh(
    checkpoint: Path, deployed: Callable[[Sequence[ServiceSpec]], Sequence[ServiceSpec]], settings: tuple[str, ...] = ()
) -> AsyncIterator[ProcessMesh]:
    """A mesh of one worker. Answers are under way when the block begins; at its end all are those of transformers."""
    prompts = [random_prompt(length, seed=length) for length in (150, 3, 70)]
    async with process_mesh(checkpoint, settings=(*OF_MODEL, *settings), deployed=deployed) as mesh:
        asked = [asyncio.create_task(tokens_of(mesh, prompt, 60)) for prompt in prompts]
        await eventually(lambda: runs(mesh), 60)
        yield mesh
        answers = [*await asyncio.gather(*asked), await tokens_of(mesh, prompts[0], 60)]
    reference = load_oracle(checkpoint)
    for prompt, tokens in zip([*prompts, prompts[0]], answers, strict=True):
        assert_greedy(reference, prompt, tokens)


async def unregistered(mesh: ProcessMesh) -> bool:
    return await incarnation_of(mesh) is None


async def runs(mesh: ProcessMesh) -> bool:
    """Whether the worker has requests."""
    loads = {worker.identity.worker_id: worker.load.running_requests for worker in await mesh.workers()}
    return loads.get(WORKER, 0) > 0


async def test_whatever_dies_requests_get_their_tokens_and_others_keep_weights() -> None:
    said = []
    async with process_mesh(workers=2, settings=SETTINGS, deployed=on_hosts) as mesh:
        for number, (name, (lost, strike)) in enumerate(STRIKES.items()):
            asked = [asyncio.create_task(answer(mesh, AT_ONCE * number + each)) for each in range(AT_ONCE)]
            await eventually(lambda: runs(mesh), 60)
            struck = await Struck.of(mesh)
            strike(struck.hosts[lost])
            await struck.hosts[lost].ends()
            seconds = await struck.serves_again(mesh)
            await asyncio.gather(*asked)
            struck.assert_kept(lost)
            await mesh.whole(120)
            said.append(f"{name}: the worker serves again after {seconds:.1f} s")
    sys.stdout.write("\n".join(["", *said, ""]))


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("first", [False, True], ids=["another host", "the first host"])
async def test_a_model_goes_on_with_the_weights_of_other_hosts(hosts: int, first: bool, tmp_path: Path) -> None:
    checkpoint, lost = tiny_checkpoint(tmp_path), 0 if first else hosts - 1
    async with model_mesh(checkpoint, partial(on_hosts, hosts=hosts)) as mesh:
        struck = await Struck.of(mesh, hosts)
        struck.hosts[lost].service.kill()
        seconds = await struck.serves_again(mesh)
        struck.assert_kept(lost)
    sys.stdout.write(f"\n{hosts} hosts, host {lost} killed: the worker serves again after {seconds:.1f} s\n")


async def test_a_model_goes_on_without_a_lost_host(tmp_path: Path) -> None:
    # In this time a host that waits is back, which asks every second.
    settings = ("decode.engine.parallel.least_hosts=3", "decode.engine.parallel.missing_host_seconds=10")
    async with model_mesh(tiny_checkpoint(tmp_path), partial(on_hosts, hosts=4), settings) as mesh:
        struck = await Struck.of(mesh, 4)
        struck.hosts[1].service.suspend()
        seconds = await struck.serves_again(mesh)
        await struck.hosts[1].ends()
        struck.assert_kept(1)
        [worker] = await mesh.workers()
        assert len(worker.ranks) == 3
        # The first host takes in the other when it starts again.
        whole = Struck(struck.hosts, worker.identity.incarnation, time.monotonic())
        await eventually(lambda: any("serves without host 1" in line for line in mesh.lines), 60)
        struck.hosts[0].service.kill()
        await whole.serves_again(mesh)
        [worker] = await mesh.workers()
        assert len(worker.ranks) == 4
    sys.stdout.write(f"\n4 hosts, host 1 stopped: the others serve again after {seconds:.1f} s\n")


async def test_a_model_goes_on_without_a_host_whose_ranks_end(tmp_path: Path) -> None:
    settings = ("decode.engine.parallel.least_hosts=3", "decode.engine.parallel.missing_host_seconds=120")
    async with model_mesh(tiny_checkpoint(tmp_path), partial(on_hosts, hosts=4), settings) as mesh:
        struck = await Struck.of(mesh, 4)
        async with background(end_ranks(mesh, SECOND)):
            seconds = await struck.serves_again(mesh)
        [worker] = await mesh.workers()
        assert len(worker.ranks) == 3
    sys.stdout.write(f"\n4 hosts, ranks of host 1 never start: the others serve again after {seconds:.1f} s\n")


async def end_ranks(mesh: ProcessMesh, service: str) -> None:
    """Kill whatever ranks a service starts."""
    while True:
        # It may be starting again, or a rank may have ended.
        with suppress(KeyError, psutil.NoSuchProcess):
            for rank in psutil.Process(mesh.supervisor.process_ids[service]).children():
                rank.kill()
        await asyncio.sleep(0.05)


@pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")
async def test_a_model_goes_on_after_its_hosts_were_cut_apart(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path)
    with network(("scheduler", "gateway", WORKER, SECOND)) as net:
        async with model_mesh(checkpoint, partial(on_hosts, net=net)) as mesh:
            struck = await Struck.of(mesh)
            net.cut(WORKER, SECOND)
            net.cut(SECOND, WORKER)
            await eventually(lambda: unregistered(mesh), 60)
            net.heal()
            seconds = await struck.serves_again(mesh)
            struck.assert_kept()
    sys.stdout.write(f"\ncut apart: the worker serves again after {seconds:.1f} s\n")


@pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")
async def test_hosts_that_were_cut_apart_both_keep_their_weights() -> None:
    with network(("scheduler", "gateway", WORKER, SECOND, "decode-1")) as net:
        deployed = partial(on_hosts, net=net)
        async with process_mesh(workers=2, settings=SETTINGS, deployed=deployed) as mesh:
            asked = [asyncio.create_task(answer(mesh, each)) for each in range(AT_ONCE)]
            await eventually(lambda: runs(mesh), 60)
            struck = await Struck.of(mesh)
            net.cut(WORKER, SECOND)
            net.cut(SECOND, WORKER)
            await asyncio.gather(*asked)
            net.heal()
            seconds = await struck.serves_again(mesh)
            sys.stdout.write(f"\ncut apart: the worker serves again after {seconds:.1f} s\n")
            struck.assert_kept()
            await mesh.whole(120)


async def test_kv_moves_between_ranks_of_every_host() -> None:
    settings = (*SETTINGS, *SLOW_STORE, "prefill.engine.parallel.dp=2", "decode.can_prefill=false")
    deployed = partial(on_hosts, workers=("prefill-0", WORKER))
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 64, 65, 200, 300, 640) * 5)]
    async with process_mesh(prefill=1, stores=1, settings=settings, deployed=deployed) as mesh:
        await assert_right(mesh, prompts)
        # Even if a rank's pool has lost blocks, the store has those that another host computed.
        await until_stored(mesh, 1)
        received = await received_bytes(mesh)
        assert received[WORKER] > 0
        await assert_right(mesh, prompts)
        statuses = {worker.identity.worker_id: worker for worker in await mesh.workers()}
        assert len(statuses[WORKER].ranks) == 4 and len(statuses["prefill-0"].ranks) == 2
