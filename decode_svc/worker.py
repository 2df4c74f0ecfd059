"""The worker: one rank, the sessions of its gateways, and what admission says between them."""

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from decode_svc.admission import QueueLimits, admit, check
from decode_svc.config import DecodeConfig
from decode_svc.prefills import PrefillCalls, Prefills
from decode_svc.requests import Submission
from decode_svc.session import Attachment
from decode_svc.sessions import Sessions
from engine.protocol.messages import LandingOpened, Ready, StepResult, TransferNews
from kvstore.client import StoreClient
from mesh import metrics
from mesh.domain.workers import WorkerIdentity, WorkerRole
from mesh.errors import InvalidRequest, MeshError, PlaceAgain, ShuttingDown, WorkerDraining
from mesh.observe import span
from worker.identity import worker_identity
from worker.rank_client import RankClient
from worker.rank_host import RankHost
from worker.status_report import StatusReport

# How long a worker that ends waits for its gateways to take the last output.
FLUSH_SECONDS = 2.0


class DecodeWorker:
    """Made by `start`. `run` follows the rank until it goes; `drain` and `close` end it, in this order."""

    def __init__(
        self,
        config: DecodeConfig,
        endpoint: str,
        rank: RankClient,
        prefill_calls: PrefillCalls,
        clock: Callable[[], float],
    ) -> None:
        self.identity: WorkerIdentity = worker_identity(
            rank.ready,
            WorkerRole.DECODE,
            config.worker_id or endpoint,
            uuid.uuid4().hex,
            endpoint,
            config.engine.transfer,
            config.can_prefill,
        )
        self.prefills = Prefills(rank, prefill_calls, rank.ready.vocabulary_size, self._lose_prompt)
        self.sessions = Sessions(rank, self.prefills, clock, config.grace_seconds)
        self.grace_seconds = config.grace_seconds
        self._rank = rank
        self._host = RankHost(rank)
        self.stores = StoreClient(config.stores, self.identity, self._host)
        self._limits = QueueLimits(**config.queue.model_dump())

    @classmethod
    async def start(
        cls,
        config: DecodeConfig,
        endpoint: str,
        prefill_calls: PrefillCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> Self:
        """Start the rank and return when it has loaded. Raises what RankClient.start raises.

        `endpoint` is host:port of the worker's services.
        """
        return cls(config, endpoint, await RankClient.start(config.engine, config.observe), prefill_calls, clock)

    @property
    def ready(self) -> Ready:
        return self._rank.ready

    @property
    def report(self) -> StatusReport:
        return self._host.report

    @property
    def live_requests(self) -> int:
        return self.sessions.live_requests

    async def run(self) -> None:
        """Follow the rank. Raises EngineFailed once it has gone and every live request has been told so."""
        error = await self._host.run(self, self.stores)
        self.sessions.fail_all(error)
        raise error

    def submit(self, attachment: Attachment, submission: Submission) -> None:
        """Run the request or answer it with a failure. Raises as Sessions.refuse does."""
        with span("decode.submit", request_id=submission.request_id, attempt=submission.attempt):
            self._submit(attachment, submission)

    def _submit(self, attachment: Attachment, submission: Submission) -> None:
        try:
            if self._host.draining:
                raise WorkerDraining("this worker is draining: place the request on another")
            check(submission, self.ready, self.identity.can_prefill)
            admit(submission, self.sessions.backlog(attachment), self.ready.max_requests, self._limits)
        except (InvalidRequest, PlaceAgain) as error:
            self.sessions.refuse(attachment, submission, error)
        else:
            self.sessions.submit(attachment, submission)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, give live requests that time to end, then end every stream."""
        self._host.drain()
        await _wait(self.sessions.idle, seconds)
        self.sessions.fail_all(WorkerDraining("the worker stops before the request has ended: place it on another"))
        self.sessions.end_streams(ShuttingDown("the worker is stopping"))
        await _wait(self.sessions.alone, FLUSH_SECONDS)

    async def close(self) -> None:
        """Stop the rank, whatever it does."""
        await self._rank.close()

    def on_step(self, result: StepResult) -> None:
        self.sessions.on_step(result)
        metrics.DECODE_OUTPUT_TOKENS.inc(sum(len(output.token_ids) for output in result.outputs))
        metrics.DECODE_CACHED_TOKENS.inc(sum(output.cached_tokens or 0 for output in result.outputs))
        metrics.ENGINE_STORE_CACHED_TOKENS.inc(sum(output.store_cached_tokens or 0 for output in result.outputs))

    def on_news(self, news: TransferNews) -> None:
        if isinstance(news, LandingOpened):
            self.prefills.on_opened(news)

    def on_tick(self) -> None:
        sessions = self.sessions
        sessions.expire()
        metrics.DECODE_LIVE_REQUESTS.set(sessions.live_requests)
        metrics.DECODE_UNACKNOWLEDGED.set(sessions.kept_requests - sessions.live_requests)
        metrics.DECODE_GATEWAYS.set(sessions.attached_gateways)

    def _lose_prompt(self, key: int, error: MeshError) -> None:
        self.sessions.lose_prompt(key, error)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Return when the event is set, or after that time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
