"""A mesh whose workers draft with several MTP modules, and are killed: each answer has the tokens that an engine alone
draws without drafts. `make check-kills`.

Prompts share prefixes and are computed by a prefill worker, so that blocks of all draft layers are cached, landed and
computed again. The modules are copies of the shipped model's, so that some of their guesses are right.
"""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from deepmesh.v1 import common_pb2

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.messages import Submit
from launcher.shipped_model import shipped_model
from mesh.domain.sampling import Sampling
from mesh.ports import free_port
from tests.support.checkpoints import model_backend, random_prompt, with_modules
from tests.support.engines import Transcript, submit_of
from tests.support.mesh_requests import ANSWER_SECONDS, kill, placed_again, request_of
from tests.support.process_mesh import ProcessMesh, process_mesh

pytestmark = [pytest.mark.check("kills"), pytest.mark.slow]
MODULES = 3
TOKENS = 100
LENGTHS = (30, 64, 129, 190, 250, 300)
# How many answers must go on at another worker, and the most rounds until then.
MOVED = 12
MOST_ROUNDS = 10


def prompt_of(number: int) -> list[int]:
    """The prompts of one round are beginnings of one text."""
    return random_prompt(300, seed=number // len(LENGTHS))[: LENGTHS[number % len(LENGTHS)]]


def sampling_of(number: int) -> Sampling:
    return Sampling() if number % 3 == 0 else Sampling(temperature=0.7, seed=number)


@dataclass
class Answer:
    number: int
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    token_ids: list[int] = field(default_factory=list)

    async def read(self, mesh: ProcessMesh) -> None:
        request, sampling = request_of(prompt_of(self.number), TOKENS), sampling_of(self.number)
        chosen = common_pb2.SamplingParams(
            temperature=sampling.temperature, seed=sampling.seed, drafts=common_pb2.DRAFT_USE_STRICT
        )
        request.sampling.CopyFrom(chosen)
        async for message in mesh.gateway.Generate(request, timeout=ANSWER_SECONDS):
            self.token_ids += message.delta.token_ids
            if self.token_ids:
                self.begun.set()


def undisturbed(model: Path, numbers: range) -> dict[int, list[int]]:
    """The tokens of an engine without drafts."""
    engine = Engine(EngineConfig(model_dir=model, total_blocks=64), model_backend(model), time.monotonic)
    for number in numbers:
        engine.submit(submit(number))
    return Transcript().run(engine).token_ids


def submit(number: int) -> Submit:
    return submit_of(number, prompt_of(number), TOKENS, sampling=sampling_of(number), ignore_eos=True)


async def test_killed_workers_that_draft_with_several_modules_change_no_token(tmp_path: Path) -> None:
    model = with_modules(shipped_model(), tmp_path / "modules", MODULES)
    port = free_port()
    engines = ("threads=1", "dtype=float32", f"drafts.next_n={MODULES}", "max_requests=16", "total_blocks=96")
    workers = [f"{role}.engine.{setting}" for role in ("decode", "prefill") for setting in engines]
    settings = (*workers, "decode.can_prefill=false", f"gateway.server.metrics_port={port}")
    async with (
        process_mesh(model, workers=2, prefill=1, settings=settings) as mesh,
        httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS) as http,
    ):
        for round in range(MOST_ROUNDS):
            numbers = range(round * len(LENGTHS), (round + 1) * len(LENGTHS))
            answers = [Answer(number) for number in numbers]
            reading = asyncio.gather(*(answer.read(mesh) for answer in answers))
            if round % 2:
                # Kill it while it computes their prompts or pushes their KV.
                kill(mesh, "prefill-0")
            begun = asyncio.gather(*(answer.begun.wait() for answer in answers))
            await asyncio.wait((reading, begun), return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            kill(mesh, f"decode-{round % 2}")
            await reading
            expected = await asyncio.to_thread(undisturbed, model, numbers)
            assert {answer.number: answer.token_ids for answer in answers} == expected
            await mesh.whole()
            if await placed_again(http, port) >= MOVED:
                break
        assert await placed_again(http, port) >= MOVED
        await mesh.drained()
