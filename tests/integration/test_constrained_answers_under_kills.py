"""Constrained answers of a whole mesh in which workers are killed: every answer is valid. `make check-kills`.

Workers draft tokens too, a prefill worker computes prompts, and at the end no process holds anything.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh.ports import free_port
from tests.support.checkpoints import tiny_checkpoint
from tests.support.mesh_requests import kill, placed_again
from tests.support.process_mesh import ProcessMesh, process_mesh

pytestmark = [pytest.mark.check("kills"), pytest.mark.slow]
CHAT = "/v1/chat/completions"
# Answers are so long that all are still being written when a worker is killed.
ITEMS = 100
LIST = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": ITEMS, "maxItems": ITEMS}
WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"colours": LIST}, "required": ["colours"]},
    "strict": True,
}
GRAMMAR = f'start: item{{{ITEMS}}}\nitem: "<" /[0-9]{{3}}/ ">"'
FORMS: list[dict[str, Any]] = [
    {"guided_json": LIST},
    {"guided_regex": f"(red|green){{{ITEMS}}}"},
    {"guided_grammar": GRAMMAR},
    {
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
]
TOGETHER = 8
# How many answers must go on at another worker, and the most rounds until then.
MOVED = 12
MOST_ROUNDS = 8


def is_valid(form: int, text: str) -> bool:
    match form:
        case 0 | 3:
            answer = json.loads(text)
            colours = answer if form == 0 else answer["colours"]
            return len(colours) == ITEMS and set(colours) <= {"red", "green"}
        case 1:
            return re.fullmatch(f"(red|green){{{ITEMS}}}", text) is not None
        case _:
            return re.fullmatch(f"(<[0-9]{{3}}>){{{ITEMS}}}", text) is not None


@dataclass
class Writing:
    """One answer as it comes."""

    number: int
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    text: str = ""
    finish: str | None = None

    @property
    def form(self) -> int:
        return self.number % len(FORMS)

    async def read(self, http: httpx.AsyncClient) -> None:
        body = {
            "messages": [{"role": "user", "content": f"Number {self.number}."}],
            "reasoning_effort": "none",
            "temperature": 1.0,
            "seed": self.number,
            "max_tokens": 3000,
            "stream": True,
            **FORMS[self.form],
        }
        async with http.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                for choice in choices_of(line):
                    self._add(choice)

    def _add(self, choice: dict[str, Any]) -> None:
        calls = choice["delta"].get("tool_calls") or ()
        self.text += choice["delta"].get("content") or "".join(call["function"]["arguments"] for call in calls)
        self.finish = choice["finish_reason"] or self.finish
        if self.text:
            self.begun.set()


def choices_of(line: str) -> Iterator[dict[str, Any]]:
    if line.startswith("data: {"):
        chunk = json.loads(line.removeprefix("data: "))
        assert "error" not in chunk, chunk
        yield from chunk["choices"]


@asynccontextmanager
async def constrained_mesh(directory: Path, **plan: Any) -> AsyncIterator[tuple[ProcessMesh, httpx.AsyncClient]]:
    model = tiny_checkpoint(directory / "tiny", num_nextn_predict_layers=2)
    async with (
        process_mesh(model, **plan) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, trust_env=False, timeout=120) as http,
    ):
        yield mesh, http


async def token_ids(http: httpx.AsyncClient, text: str) -> list[int]:
    answer = await http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    ids: list[int] = answer.json()["tokens"]
    return ids


async def test_killed_workers_make_no_constrained_answer_invalid(tmp_path: Path) -> None:
    port = free_port()
    workers = [
        f"{role}.engine.{setting}"
        for role in ("decode", "prefill")
        for setting in ("threads=1", "drafts.next_n=3", "max_requests=16")
    ]
    settings = (*workers, "decode.can_prefill=false", f"gateway.server.metrics_port={port}")
    async with constrained_mesh(tmp_path, workers=2, prefill=1, settings=settings) as (mesh, http):
        for round in range(MOST_ROUNDS):
            answers = [Writing(round * TOGETHER + number) for number in range(TOGETHER)]
            reading = asyncio.gather(*(answer.read(http) for answer in answers))
            if round % 2:
                # Kill it while it computes their prompts or pushes their KV.
                kill(mesh, "prefill-0")
            begun = asyncio.gather(*(answer.begun.wait() for answer in answers))
            await asyncio.wait((reading, begun), return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            kill(mesh, f"decode-{round % 2}")
            await reading
            for answer in answers:
                assert answer.finish in ("stop", "tool_calls"), (answer.number, answer.finish)
                assert is_valid(answer.form, answer.text), (answer.number, answer.text)
            await mesh.whole()
            if await placed_again(http, port) >= MOVED:
                break
        assert await placed_again(http, port) >= MOVED


async def test_what_cannot_be_constrained_ends_with_one_error(tmp_path: Path) -> None:
    async with constrained_mesh(tmp_path) as (mesh, http):
        # With every "a" there are more ways to go on, until computing a mask takes too long.
        ever_slower = {
            "guided_regex": "(.*a.{0,300}){40}b.{500}",
            "logit_bias": dict.fromkeys(map(str, await token_ids(http, "a")), 100),
            "max_tokens": 1000,
        }
        wide: list[Any] = [{"anyOf": [{"properties": {f"a{n}": {}}}, {"properties": {f"b{n}": {}}}]} for n in range(24)]
        bad: list[tuple[dict[str, Any], str]] = [
            (ever_slower, "guided_regex"),
            ({"guided_json": {"allOf": wide}}, "guided_json"),
            ({"guided_json": LIST, "max_tokens": ITEMS}, "max_tokens"),
            ({"guided_grammar": "start: nothing"}, "guided_grammar"),
            ({"tools": [{"type": "function", "function": {**WEATHER, "name": "a b"}}]}, "tools[0].function.name"),
        ]
        for fields, param in bad:
            body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "none", **fields}
            answer = await http.post(CHAT, json=body)
            error = answer.json()["error"]
            assert answer.status_code == 400, error
            assert error["param"] in (param, None) and error["message"].count("\n") == 0
            streamed = await http.post(CHAT, json={**body, "stream": True})
            assert streamed.text.count('"error"') == 1
        # Clients that disconnect in the middle of an answer.
        for number in range(len(FORMS)):
            writing = Writing(number)
            reading = asyncio.create_task(writing.read(http))
            begun = asyncio.create_task(writing.begun.wait())
            await asyncio.wait((reading, begun), return_when=asyncio.FIRST_COMPLETED)
            assert not reading.done()
            reading.cancel()
        await mesh.drained()
