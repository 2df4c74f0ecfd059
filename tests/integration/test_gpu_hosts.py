"""Workers whose hosts have a GPU each, between which NCCL goes over sockets as it does between machines."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from launcher.gpus import find_gpus
from launcher.plan import ServiceSpec
from mesh.errors import ProcessFailed
from tests.support.checkpoints import tiny_checkpoint
from tests.support.hosts_mesh import Host, HostSpec, Struck, model_mesh, on_hosts
from tests.support.process_mesh import process_mesh

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(240)]
STRIKES: dict[str, Callable[[Host], None]] = {
    "kill": lambda host: host.service.kill(),
    "freeze": lambda host: host.ranks[0].suspend(),
}


def settings_of(ranks: int, **parallel: object) -> tuple[str, ...]:
    # In float32 rounding decides nothing.
    engine = {"dtype": "float32", "total_blocks": 128, "max_requests": 8, "max_step_tokens": 96, "parallel.dp": ranks}
    engine |= {f"parallel.{key}": value for key, value in parallel.items()}
    return (*(f"decode.engine.{key}={value}" for key, value in engine.items()), "scheduler.lease.seconds=2")


@pytest.mark.parametrize(
    ("name", "lost"), [("kill", 1), ("kill", 0), ("freeze", 1)], ids=["second killed", "first killed", "second frozen"]
)
async def test_ranks_on_gpus_outlive_another_host(name: str, lost: int, tmp_path: Path) -> None:
    deployed = partial(on_hosts, hosts=3, gpus=find_gpus())
    async with model_mesh(tiny_checkpoint(tmp_path), deployed, settings_of(3)) as mesh:
        struck = await Struck.of(mesh, 3)
        seconds = await struck.outlive(mesh, lost, STRIKES[name])
    sys.stdout.write(f"\n{name} host {lost} of 3: the worker serves again after {seconds:.1f} s\n")


async def test_hosts_with_gpus_go_on_without_one(tmp_path: Path) -> None:
    deployed = partial(on_hosts, hosts=3, gpus=find_gpus())
    settings = settings_of(3, least_hosts=2, missing_host_seconds=10)
    async with model_mesh(tiny_checkpoint(tmp_path), deployed, settings) as mesh:
        struck = await Struck.of(mesh, 3)
        seconds = await struck.go_on_without_suspended(mesh, 1)
    sys.stdout.write(f"\nhost 1 of 3 stopped: the others serve again after {seconds:.1f} s\n")


async def test_ranks_on_two_gpus_outlive_another_host(tmp_path: Path) -> None:
    deployed = partial(on_hosts, gpus=find_gpus(), each=2)
    async with model_mesh(tiny_checkpoint(tmp_path), deployed, settings_of(4)) as mesh:
        struck = await Struck.of(mesh)
        seconds = await struck.outlive(mesh, 1, STRIKES["kill"])
    sys.stdout.write(f"\nhost 1 of 2, of two GPUs each, killed: the worker serves again after {seconds:.1f} s\n")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, r"rank [23] of 4 \(host 1\): engine.parallel makes 2 ranks, each on a GPU of its own, and torch finds 1:"),
        (0, "host 1 of the worker computes on cpu, and host 0 on cuda: set engine.device=cuda"),
    ],
    ids=["one", "none"],
)
async def test_a_host_with_fewer_gpus_ends_the_start(count: int, words: str, tmp_path: Path) -> None:
    gpus = find_gpus()

    def deployed(specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        return [
            replace(spec, gpus=gpus[:count] or ("",)) if isinstance(spec, HostSpec) and spec.number else spec
            for spec in on_hosts(specs, gpus=gpus, each=2)
        ]

    with pytest.raises(ProcessFailed, match=words):
        async with process_mesh(tiny_checkpoint(tmp_path), settings=settings_of(4), deployed=deployed):
            pass
