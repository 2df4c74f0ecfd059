"""Running workers that take another role with the weights that they have loaded: real processes, under load."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from cli.role import change_role
from launcher.plan import HOST
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError, EndpointUnavailable
from mesh.rpc.channel import Channels
from tests.support.checkpoints import random_prompt, tiny_checkpoint
from tests.support.greedy import assert_greedy
from tests.support.mesh_requests import assert_right, prompt_of, tokens_of
from tests.support.process_mesh import ProcessMesh, oracle_settings, process_mesh
from tests.support.waiting import eventually

# Longer than any change of a role takes on a busy machine.
WAIT_SECONDS = 120.0
ROLES = ("prefill", "decode")
LENGTHS = (3, 64, 100, 200, 300)


async def take_role(
    mesh: ProcessMesh, worker: str, role: WorkerRole, drain: float | None = None, may_reload: bool = False
) -> str:
    scheduler = f"{HOST}:{mesh.plan.scheduler_port}"
    return await change_role(Channels(), scheduler, worker, role, drain, WAIT_SECONDS, may_reload)


def ranks_of(mesh: ProcessMesh, worker: str) -> dict[int, float]:
    """The processes of the worker's ranks, and when each was started."""
    service = psutil.Process(mesh.supervisor.process_ids[worker])
    return {each.pid: each.create_time() for each in service.children()}


@asynccontextmanager
async def under_load(mesh: ProcessMesh) -> AsyncIterator[None]:
    """Send requests without a pause during the block; asserts that each gets its own tokens."""
    ending = asyncio.Event()

    async def ask(number: int) -> None:
        rounds = 0
        while not ending.is_set():
            length = LENGTHS[(number + rounds) % len(LENGTHS)]
            await assert_right(mesh, [prompt_of(length, seed=100 * rounds + number)], 60)
            rounds += 1

    async with asyncio.TaskGroup() as asking:
        for number in range(6):
            asking.create_task(ask(number))
        yield
        ending.set()


@pytest.mark.check("roles")
async def test_workers_change_roles_under_load_and_lose_no_token() -> None:
    settings = oracle_settings(**{"oracle.step_ms": 5})
    async with process_mesh(workers=2, prefill=1, settings=settings) as mesh:
        ranks = ranks_of(mesh, "prefill-0") | ranks_of(mesh, "decode-1")
        async with under_load(mesh):
            # Requests that decode there go on at another worker at once.
            await take_role(mesh, "decode-1", WorkerRole.PREFILL, drain=0)
            # Without prefill workers the others compute prompts.
            for worker in ("prefill-0", "decode-1"):
                await take_role(mesh, worker, WorkerRole.DECODE)
            await take_role(mesh, "prefill-0", WorkerRole.PREFILL)
        # The processes are the same, with the weights that they had loaded.
        assert ranks_of(mesh, "prefill-0") | ranks_of(mesh, "decode-1") == ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


async def assert_as_transformers(mesh: ProcessMesh, checkpoint: Path) -> None:
    reference = DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompts = [random_prompt(length, seed=length) for length in (2, 65, 130, 300)]
    answers = await asyncio.gather(*(tokens_of(mesh, prompt, 16) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == 16
        assert_greedy(reference, prompt, answer)


@pytest.mark.check("roles")
@pytest.mark.parametrize("layout", [{}, {"tp": 2, "dp": 1}, {"tp": 1, "dp": 2}])
async def test_a_model_answers_as_transformers_whoever_computes_prompts(
    layout: dict[str, int], checkpoint: Path
) -> None:
    settings = [f"{role}.engine.parallel.{key}={value}" for role in ROLES for key, value in layout.items()]
    blocks = [f"{role}.engine.total_blocks=64" for role in ROLES]
    unlike = ["prefill.engine.max_requests=3", "prefill.engine.max_step_tokens=96", "decode.engine.max_requests=5"]
    slots = [f"{role}.engine.transfer.slot_bytes=65536" for role in ROLES]
    # Even short prompts go to a prefill worker if there is one.
    always = "scheduler.placement.handover_ms=0"
    async with process_mesh(
        checkpoint, workers=1, prefill=1, settings=(*settings, *blocks, *unlike, *slots, always)
    ) as mesh:
        ranks = ranks_of(mesh, "prefill-0")
        await assert_as_transformers(mesh, checkpoint)
        for role, requests in ((WorkerRole.DECODE, 5), (WorkerRole.PREFILL, 3)):
            await take_role(mesh, "prefill-0", role)
            (worker,) = [each for each in await mesh.workers() if each.identity.worker_id == "prefill-0"]
            assert worker.identity.max_requests == requests * layout.get("dp", 1)
            await assert_as_transformers(mesh, checkpoint)
        assert ranks_of(mesh, "prefill-0") == ranks


@pytest.mark.check("roles")
@pytest.mark.parametrize("victim", ["service", "rank"])
async def test_a_worker_killed_in_a_change_returns_as_configured(
    victim: str,
) -> None:
    async with process_mesh(workers=1, prefill=1, settings=oracle_settings()) as mesh:
        changing = asyncio.create_task(take_role(mesh, "prefill-0", WorkerRole.DECODE))
        await eventually(lambda: any("worker changes its role" in line for line in mesh.lines), WAIT_SECONDS)
        (rank,) = ranks_of(mesh, "prefill-0")
        os.kill(rank if victim == "rank" else mesh.supervisor.process_ids["prefill-0"], signal.SIGKILL)
        with pytest.raises(EndpointUnavailable, match="prefill-0 was started again as a prefill worker: see its log"):
            await changing
        await mesh.whole(WAIT_SECONDS)
        await assert_right(mesh, [prompt_of(length, seed=length) for length in LENGTHS])


@pytest.mark.check("roles")
async def test_a_worker_may_divide_its_model_again(checkpoint: Path) -> None:
    layouts = ("prefill.engine.parallel.tp=2", "decode.engine.parallel.dp=2", "decode.engine.parallel.ep=2")
    blocks = [f"{role}.engine.total_blocks=64" for role in ROLES]
    settings = (*layouts, *blocks, "scheduler.placement.handover_ms=0")
    async with process_mesh(checkpoint, workers=1, prefill=1, settings=settings) as mesh:
        ranks = ranks_of(mesh, "prefill-0")
        refused = r"engine\.parallel from \(tp 2, dp 1, ep 2\) to \(tp 1, dp 2, ep 2\), .*: have it load them again"
        with pytest.raises(ConfigError, match=refused):
            await take_role(mesh, "prefill-0", WorkerRole.DECODE)
        assert ranks_of(mesh, "prefill-0") == ranks
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL):
            said = await take_role(mesh, "prefill-0", role, may_reload=True)
            assert "the loading of its weights" in said
            await assert_as_transformers(mesh, checkpoint)
        assert not ranks_of(mesh, "prefill-0").keys() & ranks.keys()


@pytest.mark.check("roles")
async def test_workers_that_load_again_under_load_lose_no_token() -> None:
    settings = (
        *oracle_settings(**{"oracle.step_ms": 5}),
        "prefill.engine.parallel.ranks=2",
        "decode.engine.parallel.ranks=2",
    )
    async with process_mesh(workers=2, prefill=1, settings=settings) as mesh, under_load(mesh):
        await take_role(mesh, "decode-1", WorkerRole.PREFILL, drain=0, may_reload=True)
        for worker in ("prefill-0", "decode-1"):
            await take_role(mesh, worker, WorkerRole.DECODE, may_reload=True)
        await take_role(mesh, "prefill-0", WorkerRole.PREFILL, may_reload=True)
