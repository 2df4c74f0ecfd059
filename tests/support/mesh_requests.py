"""Requests to a mesh of processes, and checks of what they leave behind."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress

import grpc
import httpx
import psutil
from deepmesh.v1 import gateway_pb2

from engine.oracle.tokens import oracle_tokens
from tests.support.process_mesh import VOCABULARY, ProcessMesh
from tests.support.waiting import eventually

# Only ends a hang, before the test's own limit does.
ANSWER_SECONDS = 100.0

Call = grpc.aio.UnaryStreamCall[gateway_pb2.GenerateRequest, gateway_pb2.GenerateResponse]


def prompt_of(length: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCABULARY) for _ in range(length)]


def request_of(prompt: Sequence[int], max_tokens: int) -> gateway_pb2.GenerateRequest:
    form = gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt))
    return gateway_pb2.GenerateRequest(prompt=form, max_tokens=max_tokens, return_token_ids=True, ignore_eos=True)


async def tokens_of(mesh: ProcessMesh, prompt: Sequence[int], max_tokens: int) -> list[int]:
    call = mesh.gateway.Generate(request_of(prompt, max_tokens), timeout=ANSWER_SECONDS)
    return [token async for message in call for token in message.delta.token_ids]


async def assert_right(mesh: ProcessMesh, prompts: Sequence[Sequence[int]], max_tokens: int = 40) -> None:
    """Send all prompts at once; asserts that each answer is the one that the oracle's definition gives."""
    answers = await asyncio.gather(*(tokens_of(mesh, prompt, max_tokens) for prompt in prompts))
    assert answers == [oracle_tokens(prompt, max_tokens, VOCABULARY) for prompt in prompts]


def kill(mesh: ProcessMesh, *names: str) -> None:
    for name in names:
        os.kill(mesh.supervisor.process_ids[name], signal.SIGKILL)


async def forget(mesh: ProcessMesh, *names: str) -> None:
    """Kill workers and wait until they are back, with empty pools."""
    before = {worker.identity.incarnation for worker in await mesh.workers()}
    kill(mesh, *names)

    async def back() -> bool:
        now = {worker.identity.worker_id: worker.identity.incarnation for worker in await mesh.workers()}
        return all(name in now and now[name] not in before for name in names)

    await eventually(back, ANSWER_SECONDS)
    await mesh.whole()


async def stored_blocks(mesh: ProcessMesh) -> int:
    return sum(tier.used_blocks for store in (await mesh.snapshot()).stores for tier in store.tiers)


async def until_stored(mesh: ProcessMesh, blocks: int) -> None:
    async def stored() -> bool:
        return await stored_blocks(mesh) >= blocks

    await eventually(stored)


async def until_a_landing_is_open(mesh: ProcessMesh) -> None:
    """Suspend the prefill worker meanwhile: on a busy machine a landing opens and closes between two reports."""

    async def is_open() -> bool:
        return any(worker.transfers.open_landings for worker in await mesh.workers())

    await eventually(is_open)


@contextmanager
def suspended(mesh: ProcessMesh, name: str) -> Iterator[None]:
    """A worker whose only rank makes no step: a prefill worker computes nothing, nothing lands in a decode worker."""
    (rank,) = psutil.Process(mesh.supervisor.process_ids[name]).children()
    rank.suspend()
    try:
        yield
    finally:
        # The test may have killed it.
        with suppress(psutil.NoSuchProcess):
            rank.resume()


@asynccontextmanager
async def nothing_lands(
    mesh: ProcessMesh, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[tuple[Call, list[int]]]:
    """A request's call and first token, which is the prefill worker's; its KV lands after the block."""
    with ExitStack() as decode:
        with suspended(mesh, "prefill-0"):
            call = mesh.gateway.Generate(request_of(prompt, max_tokens), timeout=ANSWER_SECONDS)
            await until_a_landing_is_open(mesh)
            decode.enter_context(suspended(mesh, "decode-0"))
        tokens: list[int] = []
        while not tokens:
            tokens += (await anext(aiter(call))).delta.token_ids
        yield call, tokens


async def fetched_blocks(mesh: ProcessMesh) -> int:
    return sum(worker.transfers.fetched_blocks for worker in await mesh.workers())


async def received_bytes(mesh: ProcessMesh) -> dict[str, int]:
    """Bytes that each worker has received, by worker id."""
    return {each.identity.worker_id: sum(each.transfers.received_bytes.values()) for each in await mesh.workers()}


async def placed_again(http: httpx.AsyncClient, port: int) -> float:
    """How many answers went on at another worker. port: that of the gateway's metrics."""
    text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("deepmesh_gateway_replacements_total{")]
    return sum(float(line.split()[1]) for line in lines)
