"""The worker: one rank, the prompts that it computes, and what admission says before."""

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from engine.protocol.messages import Ready, StepResult, TransferNews
from kvstore.client import StoreClient
from mesh import metrics
from mesh.domain.workers import WorkerIdentity, WorkerRole
from mesh.errors import WorkerDraining
from mesh.observe import span
from prefill_svc.admission import QueueLimits, admit, check
from prefill_svc.config import PrefillConfig
from prefill_svc.jobs import Jobs
from prefill_svc.prompts import Job, Prompt
from transfer.events import PushEnded
from worker.identity import worker_identity
from worker.rank_client import RankClient
from worker.rank_host import RankHost
from worker.status_report import StatusReport


class PrefillWorker:
    """Made by `start`. `run` follows the rank until it goes; `drain` and `close` end it, in this order."""

    def __init__(self, config: PrefillConfig, endpoint: str, rank: RankClient, clock: Callable[[], float]) -> None:
        assert config.engine.transfer is not None
        self._transfer = config.engine.transfer
        self.identity: WorkerIdentity = worker_identity(
            rank.ready, WorkerRole.PREFILL, config.worker_id or endpoint, uuid.uuid4().hex, endpoint, self._transfer
        )
        self.jobs = Jobs(rank, clock)
        self._rank = rank
        self._host = RankHost(rank)
        self.stores = StoreClient(config.stores, self.identity, self._host)
        self._limits = QueueLimits(**config.queue.model_dump())

    @classmethod
    async def start(cls, config: PrefillConfig, endpoint: str, clock: Callable[[], float] = time.monotonic) -> Self:
        """Start the rank and return when it has loaded. Raises what RankClient.start raises.

        `endpoint` is host:port of the worker's services.
        """
        return cls(config, endpoint, await RankClient.start(config.engine, config.observe), clock)

    @property
    def ready(self) -> Ready:
        return self._rank.ready

    @property
    def report(self) -> StatusReport:
        return self._host.report

    @property
    def live_requests(self) -> int:
        return self.jobs.live_prompts

    async def run(self) -> None:
        """Follow the rank. Raises EngineFailed once it has gone and every caller has been told so."""
        error = await self._host.run(self, self.stores)
        self.jobs.fail_all(error)
        raise error

    def submit(self, prompt: Prompt) -> Job:
        """Raises InvalidRequest, NamespaceMismatch, WorkerFull, WorkerDraining or EngineFailed; `jobs.end` the job."""
        with span("prefill.submit", request_id=prompt.request_id, attempt=prompt.attempt):
            if self._host.draining:
                raise WorkerDraining("this worker is draining: place the prompt on another")
            check(prompt, self.ready, self._transfer)
            admit(prompt, self.jobs.backlog(), self.ready.max_requests, self._limits)
            job = self.jobs.submit(prompt)
        metrics.PREFILL_PROMPT_TOKENS.inc(len(prompt.token_ids))
        return job

    def predicted_seconds(self, prompt: Prompt) -> float:
        """Until its first token; 0 while the rank's pace is unknown."""
        load = self.report.load
        tokens = load.queued_prefill_tokens + len(prompt.token_ids)
        return tokens / load.prefill_tokens_per_second if load.prefill_tokens_per_second else 0.0

    async def drain(self, seconds: float) -> None:
        """Take nothing new, give the prompts there are that time to end, then fail them."""
        self._host.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.jobs.idle.wait()
        self.jobs.fail_all(WorkerDraining("the worker stops before the prompt was pushed: place it on another"))

    async def close(self) -> None:
        """Stop the rank, whatever it does."""
        await self._rank.close()

    def on_step(self, result: StepResult) -> None:
        self.jobs.on_step(result)
        metrics.PREFILL_CACHED_TOKENS.inc(sum(output.cached_tokens or 0 for output in result.outputs))
        metrics.ENGINE_STORE_CACHED_TOKENS.inc(sum(output.store_cached_tokens or 0 for output in result.outputs))

    def on_news(self, news: TransferNews) -> None:
        # Nothing lands here.
        assert isinstance(news, PushEnded)
        self.jobs.on_push_ended(news)

    def on_tick(self) -> None:
        self.jobs.expire()
        metrics.PREFILL_LIVE_PROMPTS.set(self.jobs.live_prompts)
