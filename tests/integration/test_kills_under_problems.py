"""The shipped model, on one GPU in the number formats that workers choose there, asked problems whose answers can be
judged while its processes are killed. No answer is lost, and none that was right before is wrong.

Two decode workers that draft, a prefill worker and a store share the GPU. Roundings depend on which requests share a
step, so texts may differ a little; what they say may not. `make check-kills` runs it on a CPU.
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from eval.suite import Question, questions
from eval.tasks.problem import grade
from launcher.shipped_model import shipped_model
from tests.support.mesh_requests import kill
from tests.support.process_mesh import ProcessMesh, process_mesh
from tests.support.waiting import eventually

SHORT_TASKS = ("add", "subtract", "multiply", "divide", "copy_text", "reverse_string", "look_up", "word_problem")
LONG_TASKS = ("needle 1k", "key_value 1k", "needle 2k")
PROBLEMS, LONG_PROBLEMS = 3, 4
# What is killed, each time all are there. A worker's rank is its process with the model.
RANK = "'s rank"
STRIKES = (
    ("decode-0",),
    (f"decode-1{RANK}",),
    ("prefill-0",),
    ("kvstore-0", "decode-1"),
    (f"prefill-0{RANK}", "decode-0"),
)
STREAMS = 12
# One request in this many is cancelled, within this time.
CANCELLED_ONE_IN, CANCEL_SECONDS = 6, 0.5
# A mesh that nothing disturbs must answer at least this share of all problems right.
LEAST_RIGHT = 0.9
ANSWER_SECONDS, BACK_SECONDS = 120.0, 90.0
BLOCKS: dict[str, object] = {"total_blocks": 1024, "host_blocks": 128, "max_requests": 16, "drafts.next_n": 1}
ON: dict[str, dict[str, object]] = {"cuda": {"memory_share": 0.2}, "cpu": {"threads": 1}}


@dataclass
class Soak:
    """questions: to which an undisturbed mesh gave these `texts`, which are right."""

    http: httpx.AsyncClient
    url: str
    questions: list[Question]
    texts: dict[str, str] = field(default_factory=dict)
    answered: int = 0
    cancelled: int = 0
    differing: int = 0
    wrong: list[str] = field(default_factory=list)

    async def ask(self, question: Question) -> str:
        """The answer's text. Raises if there is none."""
        body = {
            "model": "tiny-r1",
            "messages": [{"role": "user", "content": question.problem.prompt}],
            "max_tokens": question.max_tokens,
            "temperature": 0,
        }
        response = await self.http.post(f"{self.url}/v1/chat/completions", json=body)
        assert response.is_success, f"{question.id}: {response.status_code} {response.text[:300]}"
        content: str = response.json()["choices"][0]["message"]["content"]
        return content

    async def undisturbed(self) -> None:
        texts = await asyncio.gather(*(self.ask(question) for question in self.questions))
        pairs = list(zip(self.questions, texts, strict=True))
        self.texts = {question.id: text for question, text in pairs if grade(question.problem, text)}
        self.questions = [question for question, _ in pairs if question.id in self.texts]

    async def answer(self, question: Question) -> None:
        text = await self.ask(question)
        self.answered += 1
        self.differing += text != self.texts[question.id]
        if not grade(question.problem, text):
            self.wrong.append(f"{question.id}: {text!r} for {self.texts[question.id]!r}")

    async def answers(self, count: int) -> None:
        """Wait until this many more have come."""
        wanted = self.answered + count
        await eventually(lambda: self.answered >= wanted, ANSWER_SECONDS)

    async def stream(self, seed: int, until: asyncio.Event) -> None:
        source = random.Random(seed)
        while not until.is_set():
            question = source.choice(self.questions)
            if source.randrange(CANCELLED_ONE_IN):
                await self.answer(question)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(source.random() * CANCEL_SECONDS):
                    await self.ask(question)
            self.cancelled += 1


def asked() -> list[Question]:
    drawn = questions("all", 7, problems=PROBLEMS, long_problems=LONG_PROBLEMS)
    return [question for question in drawn if question.group in (*SHORT_TASKS, *LONG_TASKS)]


async def incarnations(mesh: ProcessMesh) -> dict[str, str]:
    return {worker.identity.worker_id: worker.identity.incarnation for worker in await mesh.workers()}


async def strike(mesh: ProcessMesh, names: Sequence[str]) -> float:
    """Kill processes and wait until they are back; returns the seconds."""
    before, struck = await incarnations(mesh), time.monotonic()
    services = {name.removesuffix(RANK) for name in names}
    for name in names:
        if name.endswith(RANK):
            [rank] = psutil.Process(mesh.supervisor.process_ids[name.removesuffix(RANK)]).children()
            rank.kill()
        else:
            kill(mesh, name)

    async def back() -> bool:
        now = await incarnations(mesh)
        return all(now.get(name, before[name]) != before[name] for name in services & before.keys())

    await eventually(back, BACK_SECONDS)
    await mesh.whole(BACK_SECONDS)
    return time.monotonic() - struck


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "device", [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.check("kills"))]
)
async def test_killed_processes_cost_no_answer_to_a_problem(device: str) -> None:
    engine = {"device": device, **BLOCKS, **ON[device]}
    settings = [f"{role}.engine.{key}={value}" for role in ("decode", "prefill") for key, value in engine.items()]
    began, said = time.monotonic(), []
    async with (
        process_mesh(shipped_model(), workers=2, prefill=1, stores=1, settings=tuple(settings)) as mesh,
        httpx.AsyncClient(trust_env=False, timeout=ANSWER_SECONDS) as http,
    ):
        soak, all_questions = Soak(http, mesh.http_url, asked()), len(asked())
        said.append(f"served after {time.monotonic() - began:.1f} s")
        await soak.undisturbed()
        assert len(soak.questions) >= LEAST_RIGHT * all_questions
        ended = asyncio.Event()
        streams = [asyncio.create_task(soak.stream(seed, ended)) for seed in range(STREAMS)]
        for names in STRIKES:
            await soak.answers(STREAMS)
            seconds = await strike(mesh, names)
            said.append(f"{' and '.join(names)} back after {seconds:.1f} s, {soak.answered} answers")
        ended.set()
        await asyncio.gather(*streams)
        await asyncio.gather(*map(soak.answer, soak.questions))
        await mesh.drained()
    counts = f"{soak.answered} answers, {soak.differing} in other words, {soak.cancelled} cancelled"
    sys.stdout.write("\n".join(["", *said, f"{counts}, {len(soak.wrong)} wrong", ""]))
    assert not soak.wrong
