"""Every process is killed, frozen, stopped in order and away for a while, in every phase of a request: no token is
lost, repeated or changed, and nothing is held afterwards. A few cells of the matrix in `make test`, all of them in
`make chaos`."""

import asyncio
import itertools
import os
import random
import signal
import time
from contextlib import suppress
from functools import partial

import psutil
import pytest

from tests.support.chaos import PHASES, ChaosMesh, chaos_mesh, run_cell

TARGETS = ("prefill-0", "decode-0", "rank", "scheduler", "kvstore-0", "gateway", "redis")
# Until whoever keeps Redis running starts it again.
REDIS_AWAY_SECONDS = 1.0
# A machine that is started again: longer than a lease, and than a worker's grace.
RESTART_SECONDS = 5.0
FREEZES = {"freeze": 3.0, "freeze-15": 15.0, "freeze-60": 60.0}
ACTIONS = ("kill", "restart", "drain", *FREEZES)
# Those of the short form.
QUICK_ACTIONS = ("kill", "drain", "freeze")
SEED = int(os.environ.get("DEEPMESH_CHAOS_SEED", "1"))
# Cells of the short form; DEEPMESH_CHAOS_SEED chooses others.
SHORT = 1


def process_of(chaos: ChaosMesh, target: str) -> psutil.Process:
    """Raises psutil.NoSuchProcess while it is being started again."""
    if target == "redis":
        return psutil.Process(chaos.redis.process_id)
    process = psutil.Process(chaos.mesh.supervisor.process_ids["decode-0" if target == "rank" else target])
    if target != "rank":
        return process
    ranks = process.children()
    if not ranks:
        raise psutil.NoSuchProcess(process.pid)
    return ranks[0]


async def strike(target: str, action: str, chaos: ChaosMesh) -> None:
    process = process_of(chaos, target)
    if action == "kill":
        process.kill()
    elif action == "restart":
        await keep_away(target, chaos)
    elif action == "drain":
        process.send_signal(signal.SIGTERM)
        # A rank leaves signals to its service. What still stops must not be taken for what was started again.
        if target not in ("rank", "redis"):
            await asyncio.to_thread(process.wait, 30)
    else:
        process.suspend()
        await asyncio.sleep(FREEZES[action])
        # A rank that makes no progress is ended by its service.
        with suppress(psutil.NoSuchProcess):
            process.resume()
    if target == "redis" and action in ("kill", "restart", "drain"):
        await asyncio.sleep(REDIS_AWAY_SECONDS)
        await chaos.redis.start_again()


async def keep_away(target: str, chaos: ChaosMesh) -> None:
    """Kill it, and whatever is started in its place, for as long as a machine takes to come back."""
    end = time.monotonic() + RESTART_SECONDS
    while time.monotonic() < end:
        with suppress(psutil.NoSuchProcess):
            process_of(chaos, target).kill()
        await asyncio.sleep(0.05)


@pytest.mark.timeout(240)
async def test_a_few_cells_of_the_matrix() -> None:
    cells = random.Random(SEED).sample(list(itertools.product(TARGETS, QUICK_ACTIONS, PHASES)), SHORT)
    async with chaos_mesh() as chaos:
        for target, action, phase in cells:
            await run_cell(chaos, f"{target} {action}", phase, partial(strike, target, action), SEED)


@pytest.mark.check("chaos")
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("target", TARGETS)
async def test_every_cell_of_the_matrix(target: str, action: str) -> None:
    # The launcher gives up what ends too often.
    async with chaos_mesh() as chaos:
        for phase in PHASES:
            await run_cell(chaos, f"{target} {action}", phase, partial(strike, target, action), SEED)
