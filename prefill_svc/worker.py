"""The worker: its ranks, the prompts that they compute, and the admission before them."""

import time
from collections.abc import Callable
from typing import Self

from engine.protocol.messages import StepResult, TransferNews
from mesh.domain.workers import WorkerRole
from mesh.errors import WorkerDraining
from mesh.observe import metrics
from mesh.observe.spans import span
from mesh.rpc.channel import Channels
from prefill_svc.admission import admit, check
from prefill_svc.config import PrefillConfig
from prefill_svc.jobs import Jobs
from prefill_svc.prompts import Job, Prompt
from transfer.events import PushEnded
from worker.handover import Handover
from worker.hosts.joined import JoinedHosts
from worker.ranks.host import RankHost
from worker.settled import settled


class PrefillWorker:
    """Made by `start`. `run` reads the ranks until one dies; to stop, call `drain` and then `host.close`."""

    def __init__(self, config: PrefillConfig, host: RankHost, clock: Callable[[], float] = time.monotonic) -> None:
        assert config.engine.transfer is not None
        self._transfer = config.engine.transfer
        self.host = host
        self.jobs = Jobs(host.ranks, clock)
        self._queue = config.queue

    @classmethod
    async def start(
        cls,
        config: PrefillConfig,
        endpoint: str,
        channels: Channels,
        handover: Handover | None = None,
        hosts: JoinedHosts | None = None,
    ) -> Self:
        """Settle the configuration, start the ranks or take them over, and return once they have loaded. Raises
        CheckpointError, ConfigError, and as RankClient.start does.

        `endpoint`: host:port of the worker's services; `channels`: for the stores; `hosts`: the worker's other hosts,
        if it has several.
        """
        role = WorkerRole.PREFILL
        config = settled(config, role)
        return cls(config, await RankHost.start(config, role, endpoint, channels, handover=handover, hosts=hosts))

    @property
    def live_requests(self) -> int:
        return self.jobs.live_prompts

    async def run(self) -> None:
        """Run until a rank dies. Raises EngineFailed once every live prompt has failed with it."""
        error = await self.host.run(self)
        self.jobs.fail_all(error)
        raise error

    def submit(self, prompt: Prompt) -> Job:
        """Raises InvalidRequest, NamespaceMismatch, WorkerFull, WorkerDraining or EngineFailed. Call `jobs.end` with
        the job.
        """
        with span("prefill.submit", request_id=prompt.request.request_id, attempt=prompt.request.attempt):
            self.host.check_takes_new()
            check(prompt, self.host.ready, self._transfer)
            admit(prompt, self.jobs.backlog(prompt.request.share), self.host.ready.max_requests, self._queue)
            job = self.jobs.submit(prompt)
        metrics.PREFILL_PROMPT_TOKENS.inc(len(prompt.request.token_ids))
        return job

    def predicted_seconds(self, prompt: Prompt) -> float:
        """Predicted time until the prompt's first token; 0 while the ranks' pace is unknown."""
        load, identity = self.host.report.load, self.host.identity
        tokens = load.queued_prefill_tokens + len(prompt.request.token_ids)
        rate = load.prefill_tokens_per_second or identity.first_rate
        return tokens / rate if rate else 0.0

    async def drain(self, seconds: float) -> None:
        """Take nothing new, give the live prompts `seconds` to end, then fail them."""
        await self.host.drain(self.jobs.idle, seconds)
        self.jobs.fail_all(WorkerDraining("the worker stops before the prompt was pushed: place it on another"))

    def on_step(self, result: StepResult) -> None:
        self.jobs.on_step(result)
        metrics.PREFILL_CACHED_TOKENS.inc(sum(output.cached_tokens or 0 for output in result.outputs))

    def on_news(self, news: TransferNews) -> None:
        # Nothing lands on a prefill worker.
        assert isinstance(news, PushEnded)
        self.jobs.on_push_ended(news)

    def on_tick(self) -> None:
        self.jobs.expire()
        metrics.PREFILL_LIVE_PROMPTS.set(self.jobs.live_prompts)
