"""Workers whose hosts have a GPU each, between which NCCL goes over sockets as it does between machines."""

import sys
from functools import partial
from pathlib import Path

import pytest

from launcher.gpus import find_gpus
from tests.support.checkpoints import tiny_checkpoint
from tests.support.hosts_mesh import Struck, model_mesh, on_hosts

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(240)]


def settings_of(ranks: int, **parallel: object) -> tuple[str, ...]:
    # In float32 rounding decides nothing.
    engine = {"dtype": "float32", "total_blocks": 128, "max_requests": 8, "max_step_tokens": 96, "parallel.dp": ranks}
    engine |= {f"parallel.{key}": value for key, value in parallel.items()}
    return (*(f"decode.engine.{key}={value}" for key, value in engine.items()), "scheduler.lease.seconds=2")


@pytest.mark.parametrize("lost", [1, 0], ids=["the second host", "the first host"])
async def test_ranks_on_gpus_outlive_another_host(lost: int, tmp_path: Path) -> None:
    deployed = partial(on_hosts, hosts=3, gpus=find_gpus())
    async with model_mesh(tiny_checkpoint(tmp_path), deployed, settings_of(3)) as mesh:
        struck = await Struck.of(mesh, 3)
        seconds = await struck.outlive_killed(mesh, lost)
    sys.stdout.write(f"\nhost {lost} of 3 killed: the worker serves again after {seconds:.1f} s\n")


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
        seconds = await struck.outlive_killed(mesh, 1)
    sys.stdout.write(f"\nhost 1 of 2, of two GPUs each, killed: the worker serves again after {seconds:.1f} s\n")
