"""The worker: its ranks, the sessions of its gateways, and the admission in between."""

import time
from collections.abc import Callable, Sequence
from typing import Self

from decode_svc.admission import admit, check
from decode_svc.config import DecodeConfig
from decode_svc.prefills import PrefillCalls, Prefills
from decode_svc.session import GatewayAttachment
from decode_svc.sessions import GatewaySessions
from engine.protocol.messages import LandingOpened, Output, StepResult, TransferNews
from mesh.domain.requests import Submission
from mesh.domain.workers import WorkerRole
from mesh.errors import InvalidRequest, MeshError, PlaceAgain, ShuttingDown, WorkerDraining
from mesh.observe import metrics
from mesh.observe.spans import span
from mesh.rpc.channel import Channels
from worker.handover import Handover
from worker.hosts.joined import JoinedHosts
from worker.ranks.host import RankHost, wait_for
from worker.settled import settled

# How long a stopping worker waits for its gateways to read the last output.
FLUSH_SECONDS = 2.0


class DecodeWorker:
    """Made by `start`. `run` reads the ranks until one dies; to stop, call `drain` and then `host.close`."""

    def __init__(
        self,
        config: DecodeConfig,
        host: RankHost,
        prefill_calls: PrefillCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.prefills = Prefills(prefill_calls, host.ready, self._on_first_token, self._lose_prompt)
        self.sessions = GatewaySessions(
            host.ranks, self.prefills, clock, config.grace_seconds, log_seconds=config.log_seconds
        )
        self.grace_seconds = config.grace_seconds
        self._queue = config.queue

    @classmethod
    async def start(
        cls,
        config: DecodeConfig,
        endpoint: str,
        prefill_calls: PrefillCalls,
        channels: Channels,
        handover: Handover | None = None,
        hosts: JoinedHosts | None = None,
    ) -> Self:
        """Settle the configuration, start the ranks or take them over, and return once they have loaded. Raises
        CheckpointError, ConfigError, and as RankClient.start does.

        `endpoint`: host:port of the worker's services; `channels`: for the stores; `hosts`: the worker's other hosts,
        if it has several.
        """
        config = settled(config, WorkerRole.DECODE)
        host = await RankHost.start(config, WorkerRole.DECODE, endpoint, channels, config.can_prefill, handover, hosts)
        return cls(config, host, prefill_calls)

    @property
    def live_requests(self) -> int:
        return self.sessions.live_requests

    async def run(self) -> None:
        """Run until a rank dies. Raises EngineFailed once every live request has ended with it."""
        error = await self.host.run(self)
        self.sessions.fail_all(error)
        raise error

    def submit(self, attachment: GatewayAttachment, submission: Submission) -> None:
        """Submit the request to a rank, or answer it with a failure. Raises as GatewaySessions.refuse does."""
        with span("decode.submit", request_id=submission.request.request_id, attempt=submission.request.attempt):
            self._submit(attachment, submission)

    def _submit(self, attachment: GatewayAttachment, submission: Submission) -> None:
        try:
            self.host.check_takes_new()
            check(submission, self.host.ready, self.host.identity.can_prefill)
            admit(
                submission,
                self.sessions.backlog(attachment, submission.request.share),
                self.host.ready.max_requests,
                self._queue,
            )
        except (InvalidRequest, PlaceAgain) as error:
            self.sessions.refuse(attachment, submission, error)
        else:
            self.sessions.submit(attachment, submission)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, give live requests `seconds` to end, then end every stream."""
        await self.host.drain(self.sessions.idle, seconds)
        self.sessions.fail_all(WorkerDraining("the worker stops before the request has ended: place it on another"))
        self.sessions.end_streams(ShuttingDown("the worker is stopping"))
        await wait_for(self.sessions.alone, FLUSH_SECONDS)

    def on_step(self, result: StepResult) -> None:
        self.sessions.on_step(result)
        _count(result.outputs)

    def on_news(self, news: TransferNews) -> None:
        if isinstance(news, LandingOpened):
            self.prefills.on_opened(news)

    def on_tick(self) -> None:
        sessions = self.sessions
        sessions.expire()
        self.prefills.on_tick()
        metrics.DECODE_LIVE_REQUESTS.set(sessions.live_requests)
        metrics.DECODE_UNACKNOWLEDGED.set(sessions.kept_requests - sessions.live_requests)
        metrics.DECODE_GATEWAYS.set(sessions.attached_gateways)

    def _on_first_token(self, first: Output) -> None:
        self.sessions.on_first_token(first)
        _count([first])

    def _lose_prompt(self, key: int, error: MeshError) -> None:
        self.sessions.lose_prompt(key, error)


def _count(outputs: Sequence[Output]) -> None:
    metrics.DECODE_OUTPUT_TOKENS.inc(sum(len(output.token_ids) for output in outputs))
    metrics.DECODE_CACHED_TOKENS.inc(sum(output.cached_tokens or 0 for output in outputs))
