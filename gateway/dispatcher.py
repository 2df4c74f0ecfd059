"""Starts and ends generations; bounds their number, their duration and their unread tokens."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from gateway.config import DispatchConfig, LimitsConfig
from gateway.generation import Generation
from gateway.live import Links, LiveGeneration
from gateway.placement import Placer
from gateway.prepared import Prepared
from gateway.retries import RETRY_AFTER_MS
from gateway.rounds import Rounds
from mesh.domain.placement import Placement
from mesh.domain.shares import Census, Share
from mesh.errors import DeadlineExceeded, Overloaded, ShuttingDown, SlowClient
from mesh.observe.metrics import (
    GATEWAY_CACHED_TOKENS,
    GATEWAY_END_TO_END_SECONDS,
    GATEWAY_LIVE_GENERATIONS,
    GATEWAY_OUTPUT_TOKENS,
    GATEWAY_PROMPT_TOKENS,
    GATEWAY_QUEUE_SECONDS,
    GATEWAY_REQUEST_OUTPUT_TOKENS,
    GATEWAY_REQUEST_PROMPT_TOKENS,
    GATEWAY_TPOT_SECONDS,
    GATEWAY_TTFT_SECONDS,
    GATEWAY_UNREAD_TOKENS,
)
from mesh.observe.spans import span
from mesh.processor import ProcessorShare

SWEEP_SECONDS = 1.0
# How long generations that a stop has ended may take to tell their clients.
LAST_WORDS_SECONDS = 1.0
# The spacing of rounds is computed with at least this share of a core.
LEAST_PROCESSOR_SHARE = 0.25


class Dispatcher:
    """Use it only on the event loop that creates it; deadlines are on that loop's clock."""

    def __init__(self, placer: Placer, links: Links, dispatch: DispatchConfig, limits: LimitsConfig) -> None:
        self._placer = placer
        self._links = links
        self._dispatch = dispatch
        self._limits = limits
        self._live: set[LiveGeneration] = set()
        self._census = Census()
        # Tokens received by generations that have ended.
        self._ended_tokens = 0
        self._stopping = False
        self._rounds = Rounds(self._spacing)
        self._processor = ProcessorShare()
        # Measured over the last second.
        self._processor_share = 1.0
        # Set while no generation is live.
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def live_generations(self) -> int:
        return len(self._live)

    @property
    def received_tokens(self) -> int:
        """Tokens of all generations so far."""
        return self._ended_tokens + sum(live.generation.generated_tokens for live in self._live)

    @asynccontextmanager
    async def open(
        self, prepared: Prepared, deadline: float, placement: Placement | None = None
    ) -> AsyncIterator[LiveGeneration]:
        """Place the request and yield its generation. The block's end frees everything, also if an error ends it.

        `deadline` is on the event loop's clock, in seconds. If `placement` is given, the scheduler is asked only if
        that placement fails.

        Raises Overloaded if the gateway is full, DeadlineExceeded at the request's deadline, SlowClient if the block
        does not read tokens fast enough, and whatever placement raises.
        """
        scope = asyncio.timeout_at(deadline)
        with span("gateway.generate", model=prepared.model, prompt_tokens=len(prepared.request.token_ids)):
            self._check_room(prepared.request.share)
            live = self._live_generation(prepared, deadline, scope)
            with self._counted(live):
                try:
                    async with scope:
                        await live.begin(placement)
                        yield live
                except TimeoutError:
                    if not scope.expired():
                        raise
                    raise live.generation.given_up or DeadlineExceeded("the request's deadline passed") from None

    def _check_room(self, share: Share) -> None:
        """Raises ShuttingDown or Overloaded."""
        if self._stopping:
            raise ShuttingDown("the gateway is stopping: ask again", retry_after_ms=RETRY_AFTER_MS)
        if len(self._live) * self._census.ahead(share) >= self._limits.live_generations:
            raise Overloaded(
                f"the gateway has {len(self._live)} live generations: retry later", retry_after_ms=RETRY_AFTER_MS
            )

    def _live_generation(self, prepared: Prepared, deadline: float, scope: asyncio.Timeout) -> LiveGeneration:
        """A generation that ends its scope if it must end before its client reads again."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            if not scope.expired():
                scope.reschedule(loop.time())

        generation = Generation(prepared, deadline, self._limits.unread_tokens, interrupt)
        return LiveGeneration(
            generation, prepared.block_hashes, self._placer, self._links, self._dispatch, loop.time, self._rounds
        )

    @contextmanager
    def _counted(self, live: LiveGeneration) -> Iterator[None]:
        """Count the generation as live for the length of the block; the block's end frees all that it holds."""
        share = live.generation.request.share
        self._live.add(live)
        self._census.add(share)
        self._idle.clear()
        try:
            yield
        finally:
            self._live.discard(live)
            self._ended_tokens += live.generation.generated_tokens
            self._census.remove(share)
            if not self._live:
                self._idle.set()
            live.close()
            _observe(live, asyncio.get_running_loop().time())

    def _spacing(self) -> float:
        """Seconds between rounds, so that all live generations together stay below the limit of messages per second.

        If the gateway gets only a part of a core it sends that much less: otherwise messages would take all of it.
        """
        return len(self._live) / (self._limits.messages_per_second * self._processor_share)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let live generations run for `seconds`, then end the rest with ShuttingDown."""
        self._stopping = True
        await self._until_idle(seconds)
        for live in self._live:
            live.generation.give_up(
                ShuttingDown(
                    "the gateway is stopping before the answer is complete: ask again", retry_after_ms=RETRY_AFTER_MS
                )
            )
        await self._until_idle(LAST_WORDS_SECONDS)

    async def _until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def sweep(self) -> None:
        """Until cancelled: end the generations of clients that stopped reading, and set the gauges."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._limits.stalled_seconds / 4))
            for live in list(self._live):
                if live.stuck_seconds(loop.time()) > self._limits.stalled_seconds:
                    live.generation.give_up(
                        SlowClient(f"the client read nothing for {self._limits.stalled_seconds:g} seconds: read faster")
                    )
            self._processor_share = max(LEAST_PROCESSOR_SHARE, self._processor.measure())
            GATEWAY_LIVE_GENERATIONS.set(len(self._live))
            GATEWAY_UNREAD_TOKENS.set(sum(live.generation.unread_tokens for live in self._live))


def _observe(live: LiveGeneration, now: float) -> None:
    generation = live.generation
    model, tokens = generation.model, generation.generated_tokens
    GATEWAY_PROMPT_TOKENS.labels(model).inc(len(generation.request.token_ids))
    GATEWAY_CACHED_TOKENS.labels(model).inc(generation.cached_tokens)
    GATEWAY_OUTPUT_TOKENS.labels(model).inc(tokens)
    GATEWAY_REQUEST_PROMPT_TOKENS.labels(model).observe(len(generation.request.token_ids))
    if live.placed_at is not None:
        GATEWAY_QUEUE_SECONDS.labels(model).observe(live.placed_at - live.began_at)
    if live.finished:
        GATEWAY_END_TO_END_SECONDS.labels(model).observe(now - live.began_at)
        GATEWAY_REQUEST_OUTPUT_TOKENS.labels(model).observe(tokens)
    if live.first_token_at is not None:
        GATEWAY_TTFT_SECONDS.labels(model).observe(live.first_token_at - live.began_at)
        if tokens > 1:
            GATEWAY_TPOT_SECONDS.labels(model).observe((now - live.first_token_at) / (tokens - 1))
