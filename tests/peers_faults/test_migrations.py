"""Answers in a schema or with a call, drawn with a seed and with drafts, whose worker is killed in the middle."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mesh.ports import free_port
from tests.support.checkpoints import tiny_checkpoint
from tests.support.mesh_requests import ANSWER_SECONDS, kill, placed_again
from tests.support.process_mesh import process_mesh

ITEMS = 100
LIST = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": ITEMS, "maxItems": ITEMS}
ARGUMENTS = {"type": "object", "properties": {"colours": LIST}, "required": ["colours"]}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": ARGUMENTS, "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "colours", "schema": ARGUMENTS, "strict": True}}
FORMS: list[dict[str, Any]] = [
    {"response_format": SCHEMA},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
]
TOGETHER = 8


def body(number: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": f"Number {number}."}],
        "reasoning_effort": "none",
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 3000,
        "stream": True,
        **FORMS[number % len(FORMS)],
    }


async def written(http: httpx.AsyncClient, number: int, begun: asyncio.Event) -> str:
    """The answer's text, or the arguments of its call."""
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json=body(number)) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                calls = choice["delta"].get("tool_calls") or ()
                text += choice["delta"].get("content") or "".join(call["function"]["arguments"] for call in calls)
            if text:
                begun.set()
    return text


async def all_written(http: httpx.AsyncClient) -> tuple[asyncio.Future[list[str]], asyncio.Future[list[bool]]]:
    begun = [asyncio.Event() for _ in range(TOGETHER)]
    answers = asyncio.gather(*(written(http, number, begun[number]) for number in range(TOGETHER)))
    return answers, asyncio.gather(*(each.wait() for each in begun))


@pytest.mark.check("faults")
async def test_a_killed_worker_changes_no_constrained_answer(tmp_path: Path) -> None:
    """https://github.com/ai-dynamo/dynamo/pull/7930: a migrated answer began its schema again; since, none migrates."""
    port = free_port()
    engine = ("threads=1", "drafts.next_n=2", "max_requests=16")
    settings = (*(f"decode.engine.{each}" for each in engine), f"gateway.server.metrics_port={port}")
    model = tiny_checkpoint(tmp_path / "tiny", num_nextn_predict_layers=2)
    async with (
        process_mesh(model, workers=2, settings=settings) as mesh,
        httpx.AsyncClient(base_url=mesh.http_url, trust_env=False, timeout=ANSWER_SECONDS) as http,
    ):
        answers, _ = await all_written(http)
        undisturbed = await answers
        assert all(len(json.loads(text)["colours"]) == ITEMS for text in undisturbed)
        for worker in ("decode-0", "decode-1"):
            answers, begun = await all_written(http)
            await begun
            kill(mesh, worker)
            assert await answers == undisturbed
            await mesh.whole()
        assert await placed_again(http, port) > 0
