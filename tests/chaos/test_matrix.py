"""Every process is killed, frozen, stopped cleanly, or away for a while, in every phase of a request. No token is lost,
repeated or changed, and nothing is held afterwards. `make test` runs a few cells of the matrix, `make chaos` all of
them."""

import asyncio
import itertools
import os
import random
import signal
from contextlib import suppress
from functools import partial

import psutil
import pytest

from tests.support.chaos import PHASES, ChaosMesh, chaos_mesh, run_cell
from tests.support.waiting import eventually

TARGETS = ("prefill-0", "decode-0", "rank", "scheduler", "kvstore-0", "gateway", "redis")
# Time until Redis is started again, as by a process that keeps it running.
REDIS_AWAY_SECONDS = 1.0
# Time that a machine takes to start again. It is longer than a lease and than a worker's grace.
RESTART_SECONDS = 5.0
FREEZES = {"freeze": 3.0, "freeze-15": 15.0, "freeze-60": 60.0}
ACTIONS = ("kill", "restart", "drain", *FREEZES)
# The actions of the short form.
QUICK_ACTIONS = ("kill", "drain", "freeze")
SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
# Cells of the short form, of all and once more of the store; DEEPMESH_CHAOS_SEED chooses others.
SHORT = 1


def service_name(target: str) -> str:
    return "decode-0" if target == "rank" else target


def service_of(chaos: ChaosMesh, target: str) -> psutil.Process:
    return psutil.Process(chaos.mesh.supervisor.process_ids[service_name(target)])


async def process_of(chaos: ChaosMesh, target: str) -> psutil.Process:
    if target == "redis":
        return psutil.Process(chaos.redis.process_id)
    if target != "rank":
        return service_of(chaos, target)
    ranks: list[psutil.Process] = []

    def has_rank() -> bool:
        with suppress(psutil.NoSuchProcess):
            ranks[:] = service_of(chaos, target).children()
        return bool(ranks)

    # The phase before may have ended the rank, while schedulers know its service until its lease is over.
    await eventually(has_rank)
    return ranks[0]


async def strike(target: str, action: str, chaos: ChaosMesh) -> None:
    process = await process_of(chaos, target)
    if action in FREEZES:
        process.suspend()
        await asyncio.sleep(FREEZES[action])
        # Its service may have ended the rank, because it made no progress.
        with suppress(psutil.NoSuchProcess):
            process.resume()
    elif target == "redis":
        process.send_signal(signal.SIGTERM if action == "drain" else signal.SIGKILL)
        await asyncio.sleep(RESTART_SECONDS if action == "restart" else REDIS_AWAY_SECONDS)
        await chaos.redis.start_again()
    elif action == "drain":
        process.send_signal(signal.SIGTERM)
        # A rank ignores signals and leaves them to its service. Wait for other processes, so that a stopping process is
        # not taken for its successor.
        if target != "rank":
            await asyncio.to_thread(process.wait, 30)
    else:
        before = service_of(chaos, target)
        process.kill()
        if action == "restart":
            await hold_back(target, before, chaos)


async def hold_back(target: str, before: psutil.Process, chaos: ChaosMesh) -> None:
    """Suspend the process that is started in its place, until a machine would be back."""
    supervisor = chaos.mesh.supervisor
    await eventually(lambda: supervisor.process_ids.get(service_name(target), before.pid) != before.pid, 30)
    service = service_of(chaos, target)
    service.suspend()
    await asyncio.sleep(RESTART_SECONDS)
    service.resume()


@pytest.mark.timeout(240)
async def test_a_few_cells_of_the_matrix() -> None:
    source = random.Random(SEED)
    cells = source.sample(list(itertools.product(TARGETS, QUICK_ACTIONS, PHASES)), SHORT)
    # A store has fewer tests of other kinds than workers have.
    cells += source.sample(list(itertools.product(["kvstore-0"], QUICK_ACTIONS, PHASES)), SHORT)
    async with chaos_mesh() as chaos:
        for target, action, phase in cells:
            await run_cell(chaos, f"{target} {action}", phase, partial(strike, target, action), SEED)


@pytest.mark.check("chaos")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("target", TARGETS)
async def test_every_cell_of_the_matrix(target: str, action: str) -> None:
    # Each target and action has a mesh of its own, because the launcher gives up processes that end too often.
    async with chaos_mesh() as chaos:
        for phase in PHASES:
            await run_cell(chaos, f"{target} {action}", phase, partial(strike, target, action), SEED)
