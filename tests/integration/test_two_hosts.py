"""Requests through a worker whose services run on two hosts, while parts of it die (`make check-hosts`)."""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from functools import partial

import psutil
import pytest

from engine.oracle.tokens import oracle_tokens
from launcher.plan import ServiceSpec
from mesh.ports import free_port
from tests.support.mesh_requests import assert_right, prompt_of, received_bytes, tokens_of, until_stored
from tests.support.network import Network, network, why_no_network
from tests.support.process_mesh import SLOW_STORE, VOCABULARY, ProcessMesh, oracle_settings, process_mesh
from tests.support.separated_mesh import WORKER_PORT, SeparatedSpec, separated
from tests.support.waiting import eventually

pytestmark = pytest.mark.check("hosts")
WORKER = "decode-0"
SECOND = f"{WORKER}-1"
# The hosts are two addresses of this machine, on which the services use the same port.
ADDRESSES = ("127.0.0.1", "127.0.0.2")
SETTINGS = (
    *oracle_settings(**{"oracle.step_ms": 5, "total_blocks": 512}),
    "decode.engine.parallel.dp=4",
    "scheduler.lease.seconds=2",
    "decode.grace_seconds=2",
)
ANSWER_TOKENS = 300
AT_ONCE = 40


@dataclass(frozen=True)
class HostSpec(SeparatedSpec):
    """A worker's service on one of its hosts; `first`: the first host's address."""

    number: int = 0
    first: str = ADDRESSES[0]

    @property
    def environment(self) -> dict[str, str]:
        launcher = {"RANK": str(self.number), "WORLD_SIZE": "2", "MASTER_ADDR": self.first}
        return {**super().environment, **launcher}


def on_two_hosts(
    specs: Sequence[ServiceSpec], workers: Collection[str] = (WORKER,), net: Network | None = None
) -> list[ServiceSpec]:
    """The plan with a service of each of these workers on each host. All other services stay unchanged. With a network
    every process is at the site of its name.
    """
    deployed: list[ServiceSpec] = []
    for spec in specs if net is None else separated(net, specs):
        if spec.name not in workers:
            deployed.append(spec)
            continue
        names = spec.name, f"{spec.name}-1"
        addresses = ADDRESSES if net is None else [net.address(name) for name in names]
        port = free_port() if net is None else WORKER_PORT
        for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
            ours = {
                "name": name,
                "host": address,
                "port": port,
                "settings": (*spec.settings, "engine.parallel.hosts=2", f"server.host={address}"),
                "prefix": () if net is None else tuple(net.inside(name)),
                "number": number,
                "first": addresses[0],
            }
            deployed.append(HostSpec(**{each.name: getattr(spec, each.name) for each in fields(ServiceSpec)} | ours))
    return deployed


@dataclass
class Struck:
    """The processes of a worker: the services of both hosts, and their ranks."""

    services: list[psutil.Process]
    ranks: list[psutil.Process]

    @classmethod
    def of(cls, mesh: ProcessMesh) -> "Struck":
        services = [psutil.Process(mesh.supervisor.process_ids[name]) for name in (WORKER, SECOND)]
        ranks = [rank for service in services for rank in service.children()]
        assert len(ranks) == 4
        return cls(services, ranks)

    async def end(self) -> float:
        """Wait until all have ended, killing services that were suspended; returns seconds until the first host's
        service had ended.
        """
        began_at = time.monotonic()
        await eventually(lambda: not self.services[0].is_running(), 60)
        seconds = time.monotonic() - began_at
        for service in self.services:
            if service.is_running() and service.status() == psutil.STATUS_STOPPED:
                service.kill()
        await eventually(lambda: not any(each.is_running() for each in (*self.services, *self.ranks)), 60)
        return seconds


async def answer(mesh: ProcessMesh, seed: int) -> None:
    prompt = prompt_of(random.Random(seed).choice([20, 100, 300]), seed)
    assert await tokens_of(mesh, prompt, ANSWER_TOKENS) == oracle_tokens(prompt, ANSWER_TOKENS, VOCABULARY)


STRIKES: dict[str, Callable[[Struck], None]] = {
    "a rank of the second host is killed": lambda struck: struck.ranks[3].kill(),
    "a rank of the second host is stopped": lambda struck: struck.ranks[2].suspend(),
    "the second host's service is killed": lambda struck: struck.services[1].kill(),
    "the second host's service is stopped": lambda struck: struck.services[1].suspend(),
    "a rank of the first host is killed": lambda struck: struck.ranks[1].kill(),
    "a rank of the first host is stopped": lambda struck: struck.ranks[0].suspend(),
    "the first host's service is killed": lambda struck: struck.services[0].kill(),
}


async def runs(mesh: ProcessMesh) -> bool:
    """Whether the worker has requests."""
    loads = {worker.identity.worker_id: worker.load.running_requests for worker in await mesh.workers()}
    return loads.get(WORKER, 0) > 0


async def test_requests_get_their_own_tokens_whatever_dies_on_either_host() -> None:
    said = []
    async with process_mesh(workers=2, settings=SETTINGS, deployed=on_two_hosts) as mesh:
        for number, (name, strike) in enumerate(STRIKES.items()):
            asked = [asyncio.create_task(answer(mesh, AT_ONCE * number + each)) for each in range(AT_ONCE)]
            await eventually(lambda: runs(mesh), 60)
            struck = Struck.of(mesh)
            strike(struck)
            said.append(f"{name}: the worker has ended after {await struck.end():.1f} s")
            await asyncio.gather(*asked)
            ended_at = time.monotonic()
            await mesh.whole(120)
            said[-1] += f", and serves again {time.monotonic() - ended_at:.1f} s after the last answer"
    sys.stdout.write("\n".join(["", *said, ""]))


@pytest.mark.skipif(why_no_network() is not None, reason=f"{why_no_network()}")
async def test_a_worker_whose_hosts_are_cut_apart_ends_on_both() -> None:
    with network(("scheduler", "gateway", WORKER, SECOND, "decode-1")) as net:
        deployed = partial(on_two_hosts, net=net)
        async with process_mesh(workers=2, settings=SETTINGS, deployed=deployed) as mesh:
            asked = [asyncio.create_task(answer(mesh, each)) for each in range(AT_ONCE)]
            await eventually(lambda: runs(mesh), 60)
            struck = Struck.of(mesh)
            net.cut(WORKER, SECOND)
            net.cut(SECOND, WORKER)
            sys.stdout.write(f"\ncut apart: the first host has ended after {await struck.end():.1f} s\n")
            await asyncio.gather(*asked)
            net.heal()
            await mesh.whole(120)


async def test_kv_moves_between_ranks_of_every_host() -> None:
    settings = (*SETTINGS, *SLOW_STORE, "prefill.engine.parallel.dp=2", "decode.can_prefill=false")
    deployed = partial(on_two_hosts, workers=("prefill-0", WORKER))
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
