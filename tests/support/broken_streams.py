"""Answers that are being streamed when something happens to their worker."""

import asyncio
from typing import Any

from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import Collected, Mesh, collect, ids_request
from tests.support.waiting import eventually

PROMPT = [5, 6, 7]


def paced(**fields: Any) -> FakeDecodeWorker:
    return FakeDecodeWorker(step_seconds=0.005, **fields)


def start(mesh: Mesh, max_tokens: int = 60) -> "asyncio.Task[Collected]":
    return asyncio.create_task(collect(mesh, ids_request(PROMPT, max_tokens=max_tokens)))


async def under_way(worker: FakeDecodeWorker, tokens: int = 5) -> None:
    await eventually(lambda: any(request.generated >= tokens for request in worker.requests.values()))
