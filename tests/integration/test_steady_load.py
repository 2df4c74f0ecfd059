"""Single kills under a steady load of 800 requests over gRPC and HTTP (`make check-kills`): each answer is right. The
answers' longest pauses, which include recovery and recomputation, are printed with those of as many requests just
before, when nothing was killed: on a busy machine these have pauses too."""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence

import httpx
import pytest

from engine.oracle.tokens import oracle_tokens
from tests.support.chaos import ChaosMesh, chaos_mesh, until_serving
from tests.support.mesh_requests import kill, prompt_of
from tests.support.process_mesh import VOCABULARY
from tests.support.resuming_client import Answer

REQUESTS = 800
ARRIVAL_SECONDS = 0.1
ANSWER_TOKENS = 100
# Each of these is killed once, while requests arrive.
TARGETS = ("decode-0", "prefill-0", "scheduler", "kvstore-0", "gateway", "decode-1")
SEED = 7
# The gateway's default. Other tests give a scheduler on a busy machine twenty times as long.
DEFAULT_PATIENCE = "gateway.dispatch.answer_seconds=0.05"
pytestmark = [pytest.mark.check("kills"), pytest.mark.slow]


async def over_http(chaos: ChaosMesh, client: httpx.AsyncClient, prompt: list[int]) -> Answer:
    """An answer from the second gateway, which is never killed."""
    answer, last = Answer(), time.monotonic()
    body = {"model": "oracle", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
    url = f"{chaos.mesh.http_urls[1]}/v1/completions"
    async with client.stream("POST", url, json={**body, "stream": True, "return_token_ids": True}) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            tokens = json.loads(line[6:])["choices"][0].get("token_ids", [])
            if tokens:
                answer.longest_pause = max(answer.longest_pause, time.monotonic() - last)
                last = time.monotonic()
                answer.tokens += tokens
    return answer


def told(what: str, pauses: Sequence[float]) -> None:
    longest = sorted(pauses)
    p50, p90, p99 = (longest[round(part * (len(longest) - 1))] for part in (0.5, 0.9, 0.99))
    figures = f"p50 {p50:.2f} s, p90 {p90:.2f} s, p99 {p99:.2f} s, all {longest[-1]:.2f} s"
    sys.stdout.write(f"{what}: longest pauses of {len(longest)} answers: {figures}\n")
    sys.stdout.flush()


async def test_answers_are_right_while_processes_are_killed() -> None:
    source = random.Random(SEED)
    undisturbed, struck = [], []
    async with chaos_mesh(None, DEFAULT_PATIENCE) as chaos, httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def ask(number: int) -> float:
            prompt = prompt_of(source.choice([20, 150, 400]), source.randrange(2**31))
            over_grpc = number % 2 == 0
            answer = await (chaos.client.ask(prompt, ANSWER_TOKENS) if over_grpc else over_http(chaos, http, prompt))
            assert answer.tokens == oracle_tokens(prompt, ANSWER_TOKENS, VOCABULARY), number
            return answer.longest_pause

        async def load(requests: int, killed: str | None) -> list[float]:
            """Send this many requests at a steady pace; returns their longest pauses. killed: a process that is killed
            halfway.
            """
            asked = []
            for number in range(requests):
                asked.append(asyncio.create_task(ask(number)))
                await asyncio.sleep(ARRIVAL_SECONDS)
                if number == requests // 2 and killed is not None:
                    kill(chaos.mesh, killed)
            return await asyncio.gather(*asked)

        each = -(-REQUESTS // (2 * len(TARGETS)))
        for killed in TARGETS:
            before, pauses = await load(each, None), await load(each, killed)
            await until_serving(chaos.mesh)
            told(f"{killed}, load {os.getloadavg()[0]:.0f}: before", before)
            told(f"{killed} killed", pauses)
            undisturbed += before
            struck += pauses
        told("nobody killed", undisturbed)
        told("one killed at a time", struck)
        await chaos.mesh.drained(30)
