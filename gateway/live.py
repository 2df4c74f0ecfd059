"""One live generation: its attempts on workers, one after another. Its client's task drives it."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.config import DispatchConfig
from gateway.generation import Generation
from gateway.placement import Placer
from gateway.retries import Retries, attempt_outcome
from gateway.rounds import Rounds
from gateway.text.delta import Delta
from mesh.domain.outputs import FinishReason
from mesh.domain.placement import AttemptOutcome, AttemptReport, Placement, PlacementQuery
from mesh.errors import MeshError
from mesh.observe.metrics import GATEWAY_REPLACEMENTS
from mesh.observe.spans import span


class Stream(Protocol):
    """One attempt on a link."""

    def cancel(self) -> None:
        """Stop the attempt if it has not ended; its generation receives nothing more from it."""
        ...


class Links(Protocol):
    def submit(self, placement: Placement, attempt: int, generation: Generation) -> Stream:
        """Ask the placed worker to continue `generation` from its token log; never waits."""
        ...


@dataclass(slots=True)
class Attempt:
    number: int
    worker_id: str
    stream: Stream
    began_at: float
    # Tokens that the generation had received before this attempt.
    received_before: int
    first_token_at: float | None = None


class LiveGeneration:
    """Places a request, yields its deltas, and places it again if a worker is lost or has no room."""

    def __init__(
        self,
        generation: Generation,
        block_hashes: Sequence[bytes],
        placer: Placer,
        links: Links,
        config: DispatchConfig,
        clock: Callable[[], float],
        rounds: Rounds,
    ) -> None:
        """`rounds`: the times at which tokens go to clients, at most once a round for each stream."""
        self.generation = generation
        self.finished = False
        self.began_at = clock()
        self.first_token_at: float | None = None
        # When the request was first given to a worker.
        self.placed_at: float | None = None
        # The placement of the last attempt.
        self.placement: Placement | None = None
        # The scheduler's name for this generation.
        self._generation_id = secrets.token_hex(16)
        self._block_hashes = block_hashes
        self._placer = placer
        self._links = links
        self._clock = clock
        self._rounds = rounds
        # Time of the round for which tokens wait. The end of an answer does not wait.
        self._due = 0.0
        self._retries = Retries(config, clock)
        self._attempt: Attempt | None = None
        self._reads_seen = 0
        self._moved_at = self.began_at

    @property
    def prompt_arrived(self) -> bool:
        """Whether the prompt's KV is on the decode worker. With a prefill worker the first token may arrive before the
        KV that is pushed.
        """
        pushed = self.placement is not None and self.placement.prefill is not None
        return self.generation.received_tokens > int(pushed)

    async def begin(self, placement: Placement | None = None) -> None:
        """Submit the request as `placement` says, or where the scheduler places it.

        Raises the scheduler's refusal; NoWorker and SchedulerUnavailable only after waiting for one.
        """
        if self.generation.ended:
            # The stream's log already holds the whole answer.
            return
        if placement is None:
            await self._place(None)
        else:
            self._retries.begin()
            self._submit(placement)

    async def next(self) -> Delta:
        """The next delta; the one with `finish` is the last. Raises the MeshError that ends the generation."""
        while True:
            await self.generation.readable(self._due, self._rounds.call_at)
            if self.generation.pop_doubt():
                await self._move()
                continue
            failure = self.generation.pop_failure()
            if failure is not None:
                await self._continue_elsewhere(failure)
                continue
            delta = self.generation.drain()
            attempt = self._attempt
            if attempt is not None and attempt.first_token_at is None and delta.token_ids:
                attempt.first_token_at = self._clock()
                self.first_token_at = self.first_token_at or attempt.first_token_at
            if delta.finish is not None:
                self.finished = True
                self._end_attempt(AttemptOutcome.FINISHED)
            if delta.empty:
                continue
            self._due = self._rounds.next()
            return delta

    def close(self) -> None:
        """Free all that the request still holds."""
        self._end_attempt(AttemptOutcome.CANCELLED)

    def stuck_seconds(self, now: float) -> float:
        """Seconds for which the client's task has not asked for tokens."""
        placing = self._attempt is None and not self.finished
        if placing or self.generation.awaited or self.generation.reads != self._reads_seen:
            self._reads_seen = self.generation.reads
            self._moved_at = now
        return now - self._moved_at

    async def _continue_elsewhere(self, failure: MeshError) -> None:
        attempt = self._attempt
        outcome = attempt_outcome(failure)
        self._retries.note_failure(answered=attempt is not None and attempt.first_token_at is not None)
        self._end_attempt(outcome)
        if outcome is AttemptOutcome.FAILED or attempt is None:
            raise failure
        if self.generation.remaining_tokens <= 0:
            self.generation.finish(FinishReason.LENGTH)
            return
        GATEWAY_REPLACEMENTS.labels(outcome.value).inc()
        # If the failure names a worker, avoid that one: a decode worker's attempt may fail because of its prefill
        # worker.
        self._retries.avoid |= {failure.metadata.get("worker_id", attempt.worker_id)}
        await self._place(failure)

    async def _move(self) -> None:
        """Continue on another worker if there is one: the present one cannot be reached.

        This cancels the old attempt, so nothing that its worker still sends reaches the generation.
        """
        attempt = self._attempt
        if attempt is None or self.generation.ended:
            return
        if self.generation.remaining_tokens <= 0:
            self.generation.finish(FinishReason.LENGTH)
            return
        self._retries.avoid |= {attempt.worker_id}
        self._retries.begin(moves=True)
        try:
            placement = await self._ask_placement()
        except MeshError:
            # No other worker takes the request, so it stays: its worker may be back before its grace ends. Workers
            # avoided before may also be back, so only this one is avoided from now on.
            self._retries.avoid = frozenset({attempt.worker_id})
            return
        if self.generation.ended or self.generation.remaining_tokens <= 0:
            self._give_up_placement()
            return
        GATEWAY_REPLACEMENTS.labels(AttemptOutcome.LOST.value).inc()
        self._end_attempt(AttemptOutcome.LOST)
        self.generation.begin_attempt()
        self._submit(placement)

    async def _place(self, cause: MeshError | None) -> None:
        """Ask for a placement until there is one. `cause` is why the request is placed again; None the first time."""
        while True:
            if cause is not None:
                await asyncio.sleep(self._retries.pause_seconds(cause))
            self._retries.begin()
            try:
                placement = await self._ask_placement()
            except MeshError as refusal:
                cause = self._retries.settle_refusal(refusal, cause)
                continue
            self._submit(placement)
            return

    async def _ask_placement(self) -> Placement:
        """Raises the scheduler's refusal."""
        try:
            with span("gateway.place", attempt=self._retries.attempts):
                return await self._placer.place(self._query())
        except asyncio.CancelledError:
            # The client is gone, but the scheduler may have placed the request.
            self._give_up_placement()
            raise

    def _give_up_placement(self) -> None:
        """Tell the scheduler that the placement that was asked for last is not used."""
        request_id, attempt = self.generation.request.request_id, self._retries.attempts
        cancelled = AttemptOutcome.CANCELLED
        self._placer.report(AttemptReport(self._generation_id, attempt, cancelled, 0, request_id=request_id))

    def _query(self) -> PlacementQuery:
        request = self.generation.request
        return PlacementQuery(
            generation_id=self._generation_id,
            request_id=request.request_id,
            attempt=self._retries.attempts,
            model=self.generation.model,
            prompt_tokens=self.generation.next_position,
            max_tokens=self.generation.remaining_tokens,
            block_hashes=self._block_hashes,
            avoid=self._retries.avoid,
            share=request.share,
            sparse=request.sparse,
        )

    def _submit(self, placement: Placement) -> None:
        self.placement = placement
        self.placed_at = self.placed_at or self._clock()
        self._attempt = Attempt(
            number=self._retries.attempts,
            worker_id=placement.decode.worker_id,
            stream=self._links.submit(placement, self._retries.attempts, self.generation),
            began_at=self._clock(),
            received_before=self.generation.received_tokens,
        )

    def _end_attempt(self, outcome: AttemptOutcome) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.stream.cancel()
            self._placer.report(self._report(attempt, outcome, self._clock()))

    def _report(self, attempt: Attempt, outcome: AttemptOutcome, now: float) -> AttemptReport:
        tokens = self.generation.received_tokens - attempt.received_before
        first = attempt.first_token_at
        return AttemptReport(
            generation_id=self._generation_id,
            request_id=self.generation.request.request_id,
            attempt=attempt.number,
            worker_id=attempt.worker_id,
            outcome=outcome,
            output_tokens=tokens,
            cached_tokens=0 if attempt.received_before else self.generation.cached_tokens,
            time_to_first_token_ms=0.0 if first is None else 1000 * (first - attempt.began_at),
            time_per_output_token_ms=0.0 if first is None or tokens < 2 else 1000 * (now - first) / (tokens - 1),
        )
