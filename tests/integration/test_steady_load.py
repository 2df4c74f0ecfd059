"""Single kills under a steady load of 800 requests over gRPC and HTTP (`make check-kills`): each answer is right. The
longest pauses are printed, beside those of a time in which nobody is killed: recovery and recomputation together."""

import asyncio
import json
import random
import statistics
import sys
import time

import httpx
import pytest

from engine.oracle import oracle_tokens
from tests.support.chaos import ChaosMesh, chaos_mesh, until_serving
from tests.support.mesh_requests import kill, prompt_of
from tests.support.process_mesh import VOCABULARY
from tests.support.resuming_client import Answer

REQUESTS = 800
ARRIVAL_SECONDS = 0.1
ANSWER_TOKENS = 100
# Each is killed once, while requests come.
TARGETS = ("decode-0", "prefill-0", "scheduler", "kvstore-0", "gateway", "decode-1")
SEED = 7
pytestmark = [pytest.mark.check("kills"), pytest.mark.slow]


async def over_http(chaos: ChaosMesh, client: httpx.AsyncClient, prompt: list[int]) -> Answer:
    """From the second gateway, which nobody kills."""
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


async def test_every_answer_is_right_while_processes_are_killed_one_by_one() -> None:
    source = random.Random(SEED)
    pauses: dict[str, list[float]] = {}
    async with chaos_mesh() as chaos, httpx.AsyncClient(trust_env=False, timeout=60) as http:

        async def ask(number: int, killed: str) -> None:
            prompt = prompt_of(source.choice([20, 150, 400]), source.randrange(2**31))
            over_grpc = number % 2 == 0
            answer = await (chaos.client.ask(prompt, ANSWER_TOKENS) if over_grpc else over_http(chaos, http, prompt))
            assert answer.tokens == oracle_tokens(prompt, ANSWER_TOKENS, VOCABULARY), (number, killed)
            pauses[killed].append(answer.longest_pause)

        each = REQUESTS // (len(TARGETS) + 1)
        for killed in ("nobody", *TARGETS):
            pauses[killed] = []
            asked: list[asyncio.Task[None]] = []
            for number in range(each):
                asked.append(asyncio.create_task(ask(number, killed)))
                await asyncio.sleep(ARRIVAL_SECONDS)
                if number == each // 2 and killed != "nobody":
                    kill(chaos.mesh, killed)
            await asyncio.gather(*asked)
            await until_serving(chaos.mesh)
            longest = sorted(pauses[killed])
            sys.stdout.write(
                f"{killed} killed: {len(longest)} answers, longest pauses: median {statistics.median(longest):.2f} s, "
                f"p99 {longest[round(0.99 * (len(longest) - 1))]:.2f} s, all {longest[-1]:.2f} s\n"
            )
            sys.stdout.flush()
        await chaos.mesh.drained(30)
