"""Several generations that answer one request, merged into one stream."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from gateway.asks import Ask
from gateway.gateway import Gateway
from gateway.live import LiveGeneration
from gateway.tenants import Tenant
from gateway.text.delta import Delta, Usage
from mesh.domain.sampling import check_prompt_logprobs

# Pieces queued for the client's task. If the queue is full, each generation keeps its tokens in its own buffer.
WAITING_PIECES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A delta of one choice."""

    index: int
    delta: Delta
    # Tokens that this choice has used so far.
    usage: Usage


class Choices(Protocol):
    """The answers to one request: choices 0 to n-1 belong to its first prompt, the next n to its second, and so on."""

    @property
    def stream_token(self) -> str:
        """A token with which clients can resume the stream; empty if it cannot be resumed."""
        ...

    async def next(self) -> Piece:
        """The next delta of any choice; the one with `finish` is that choice's last. Raises the error of a choice that
        fails.
        """
        ...


class OneChoice:
    def __init__(self, live: LiveGeneration) -> None:
        self._live = live

    @property
    def stream_token(self) -> str:
        return self._live.generation.prepared.stream_token

    async def next(self) -> Piece:
        return await _next_piece(0, self._live)


class ManyChoices:
    """Runs one task for each choice. Only the first choice of a prompt computes it. The others wait until then and go
    to the same workers, where they find its KV.
    """

    def __init__(self, gateway: Gateway, asks: Sequence[Ask], n: int, tenant: Tenant, api: str) -> None:
        self._gateway = gateway
        self._tenant = tenant
        self._api = api
        self._n = n
        self._pieces: asyncio.Queue[Piece | BaseException] = asyncio.Queue(WAITING_PIECES)
        self._tasks: set[asyncio.Task[None]] = set()
        # Prompt tokens over all choices, counted as each prompt is accepted.
        self._prompt_tokens = 0
        for index, ask in enumerate(asks):
            self._start(self._lead(index * n, ask))

    @property
    def stream_token(self) -> str:
        return ""

    async def next(self) -> Piece:
        piece = await self._pieces.get()
        if isinstance(piece, BaseException):
            raise piece
        return piece

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """If a choice fails, drop the queued pieces and queue the error: it ends the whole request."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            while not self._pieces.empty():
                self._pieces.get_nowait()
            self._pieces.put_nowait(error)

    async def _lead(self, first: int, ask: Ask) -> None:
        """The first choice of a prompt, which starts the others."""
        waiting = self._n > 1
        async with self._gateway.generate(ask, self._tenant, self._api) as live:
            # Each choice repeats the log probabilities of its prompt, so the prompt counts once for each of them.
            self._prompt_tokens += self._n * live.generation.usage.prompt_tokens
            check_prompt_logprobs(ask.sampling, self._prompt_tokens)
            async for piece in _pieces(first, live):
                if waiting and (live.prompt_arrived or live.finished):
                    waiting = False
                    for number in range(1, self._n):
                        self._start(self._follow(first, number, live))
                await self._pieces.put(piece)

    async def _follow(self, first: int, number: int, leader: LiveGeneration) -> None:
        async with self._gateway.generate_sibling(leader, number, self._tenant, self._api) as live:
            async for piece in _pieces(first + number, live):
                await self._pieces.put(piece)


async def _next_piece(index: int, live: LiveGeneration) -> Piece:
    return Piece(index, await live.next(), live.generation.usage)


async def _pieces(index: int, live: LiveGeneration) -> AsyncIterator[Piece]:
    while not live.finished:
        yield await _next_piece(index, live)


@asynccontextmanager
async def open_choices(
    gateway: Gateway, asks: Sequence[Ask], n: int, tenant: Tenant, api: str
) -> AsyncIterator[Choices]:
    """`n` answers to each of `asks`, for the length of the block. Raises as `Gateway.generate` does."""
    if len(asks) == n == 1:
        async with gateway.generate(asks[0], tenant, api) as live:
            yield OneChoice(live)
        return
    choices = ManyChoices(gateway, asks, n, tenant, api)
    try:
        yield choices
    finally:
        await choices.close()
