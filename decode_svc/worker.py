"""The worker: one rank, the sessions of its gateways, and what admission says between them."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from decode_svc.admission import QueueLimits, admit, check
from decode_svc.config import DecodeConfig
from decode_svc.requests import Submission
from decode_svc.session import Attachment
from decode_svc.sessions import Sessions
from engine.client import RankClient
from engine.messages import Ready, StepResult
from mesh import metrics
from mesh.errors import EngineFailed, InvalidRequest, ShuttingDown, WorkerDraining, WorkerFull
from mesh.observe import span
from mesh.status_report import StatusReport

# How often deadlines and graces are looked at.
TICK_SECONDS = 0.02
# How long a worker that ends waits for its gateways to take the last output.
FLUSH_SECONDS = 2.0


class DecodeWorker:
    """Made by `start`. `run` follows the rank until it goes; `drain` and `close` end it, in this order."""

    def __init__(self, config: DecodeConfig, rank: RankClient, clock: Callable[[], float]) -> None:
        self.sessions = Sessions(rank, clock, config.grace_seconds)
        self.report = StatusReport(rank.ready.total_blocks)
        self.grace_seconds = config.grace_seconds
        self._rank = rank
        self._limits = QueueLimits(**config.queue.model_dump())
        self._draining = False

    @classmethod
    async def start(cls, config: DecodeConfig, clock: Callable[[], float] = time.monotonic) -> Self:
        """Start the rank and return when it has loaded. Raises what RankClient.start raises."""
        return cls(config, await RankClient.start(config.engine, config.observe), clock)

    @property
    def ready(self) -> Ready:
        return self._rank.ready

    async def run(self) -> None:
        """Follow the rank. Raises EngineFailed once it has gone and every live request has been told so."""
        ticks = asyncio.create_task(self._tick())
        try:
            error = await self._follow_rank()
        finally:
            ticks.cancel()
        self._draining = True
        self.report.drain()
        self.sessions.fail_all(error)
        raise error

    def submit(self, attachment: Attachment, submission: Submission) -> None:
        """Run the request or answer it with a failure. Raises as Sessions.refuse does."""
        with span("decode.submit", request_id=submission.request_id, attempt=submission.attempt):
            self._submit(attachment, submission)

    def _submit(self, attachment: Attachment, submission: Submission) -> None:
        try:
            if self._draining:
                raise WorkerDraining("this worker is draining: place the request on another")
            check(submission, self.ready)
            admit(submission, self.sessions.backlog(attachment), self.ready.max_requests, self._limits)
        except (InvalidRequest, WorkerFull, WorkerDraining) as error:
            self.sessions.refuse(attachment, submission, error)
        else:
            self.sessions.submit(attachment, submission)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, give live requests that time to end, then end every stream."""
        self._draining = True
        self.report.drain()
        await _wait(self.sessions.idle, seconds)
        self.sessions.fail_all(WorkerDraining("the worker stops before the request has ended: place it on another"))
        self.sessions.end_streams(ShuttingDown("the worker is stopping"))
        await _wait(self.sessions.alone, FLUSH_SECONDS)

    async def close(self) -> None:
        """Stop the rank, whatever it does."""
        await self._rank.close()

    async def _follow_rank(self) -> EngineFailed:
        """Take its results for as long as there are any; returns why there are no more."""
        try:
            async for result in self._rank.results:
                self._on_step(result)
        except EngineFailed as error:
            return error
        status = await asyncio.shield(self._rank.closed)
        return EngineFailed(f"the engine process ended with status {status}")

    def _on_step(self, result: StepResult) -> None:
        self.sessions.on_step(result)
        self.report.observe(result.load, result.stored_blocks, result.removed_blocks, result.transfers)
        metrics.ENGINE_STEPS.inc()
        metrics.DECODE_OUTPUT_TOKENS.inc(sum(len(output.token_ids) for output in result.outputs))
        metrics.DECODE_CACHED_TOKENS.inc(sum(output.cached_tokens or 0 for output in result.outputs))

    async def _tick(self) -> None:
        metrics.ENGINE_BLOCKS_TOTAL.set(self.ready.total_blocks)
        while True:
            self.sessions.expire()
            self._set_gauges()
            await asyncio.sleep(TICK_SECONDS)

    def _set_gauges(self) -> None:
        sessions, load = self.sessions, self.report.load
        metrics.DECODE_LIVE_REQUESTS.set(sessions.live_requests)
        metrics.DECODE_UNACKNOWLEDGED.set(sessions.kept_requests - sessions.live_requests)
        metrics.DECODE_GATEWAYS.set(sessions.attached_gateways)
        metrics.ENGINE_BLOCKS_FREE.set(load.free_blocks)
        metrics.ENGINE_RUNNING.set(load.running_requests)
        metrics.ENGINE_WAITING.set(load.waiting_requests)
        metrics.ENGINE_QUEUED_PREFILL_TOKENS.set(load.queued_prefill_tokens)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set, or after that time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
