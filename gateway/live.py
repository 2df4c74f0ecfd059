"""One live generation: its attempts on workers, one after the other, as its client's task drives them."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.config import DispatchConfig
from gateway.delta import Delta
from gateway.generation import Generation
from gateway.placement import AttemptReport, Outcome, Placement, PlacementQuery, Placer
from gateway.rounds import Rounds
from mesh.domain.outputs import FinishReason
from mesh.errors import (
    MeshError,
    NamespaceMismatch,
    NoWorker,
    Overloaded,
    PrefillLost,
    Retry,
    UnknownRequest,
    WorkerLost,
)
from mesh.metrics import GATEWAY_REPLACEMENTS
from mesh.observe import span

RETRY_AFTER_MS = 1000
LONGEST_PAUSE_SECONDS = 0.5


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
    # Tokens received before this attempt.
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
        """`rounds`: when tokens go to clients, each stream at most once in a round."""
        self.generation = generation
        self.finished = False
        self.began_at = clock()
        self.first_token_at: float | None = None
        # When it was first given to a worker.
        self.placed_at: float | None = None
        # Where the request was last submitted.
        self.placement: Placement | None = None
        # What the scheduler knows the generation by.
        self._generation_id = secrets.token_hex(16)
        self._block_hashes = block_hashes
        self._placer = placer
        self._links = links
        self._config = config
        self._clock = clock
        self._rounds = rounds
        # A round of its own, before which tokens wait. An end does not wait.
        self._due = 0.0
        self._attempts = 0
        # Those of them that were made because a worker could not be reached.
        self._moves = 0
        self._attempt: Attempt | None = None
        self._avoid: set[str] = set()
        # Until this time the request is placed again, however often its workers are lost or missing; None before the
        # first time.
        self._patient_until: float | None = None
        self._reads_seen = 0
        self._moved_at = self.began_at

    @property
    def prompt_arrived(self) -> bool:
        """Whether the prompt's KV is where the tokens come from: the first token may overtake what is pushed there."""
        pushed = self.placement is not None and self.placement.prefill is not None
        return self.generation.received_tokens > int(pushed)

    async def begin(self, placement: Placement | None = None) -> None:
        """Submit the request as `placement` says, or where the scheduler places it.

        Raises the scheduler's refusal; NoWorker only after waiting for one.
        """
        if self.generation.ended:
            # Its history is whole.
            return
        if placement is None:
            await self._place(None)
        else:
            self._attempts += 1
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
                self._end_attempt(Outcome.FINISHED)
            if delta.empty:
                continue
            self._due = self._rounds.next()
            return delta

    def close(self) -> None:
        """Free what the request still holds anywhere."""
        self._end_attempt(Outcome.CANCELLED)

    def stuck_seconds(self, now: float) -> float:
        """For how long the client's task has not come back for tokens."""
        placing = self._attempt is None and not self.finished
        if placing or self.generation.awaited or self.generation.reads != self._reads_seen:
            self._reads_seen = self.generation.reads
            self._moved_at = now
        return now - self._moved_at

    async def _continue_elsewhere(self, failure: MeshError) -> None:
        attempt = self._attempt
        outcome = attempt_outcome(failure)
        if self._patient_until is None or (attempt is not None and attempt.first_token_at is not None):
            self._be_patient()
        self._end_attempt(outcome)
        if outcome is Outcome.FAILED or attempt is None:
            raise failure
        if self.generation.remaining_tokens <= 0:
            self.generation.finish(FinishReason.LENGTH)
            return
        GATEWAY_REPLACEMENTS.labels(outcome.value).inc()
        # A decode worker may have failed through the prefill worker that it names.
        self._avoid.add(failure.metadata.get("worker_id", attempt.worker_id))
        await self._place(failure)

    async def _move(self) -> None:
        """Continue on another worker than the one that cannot be reached, if there is one.

        The old attempt is cancelled: nothing that its worker still sends reaches the generation.
        """
        attempt = self._attempt
        if attempt is None or self.generation.ended:
            return
        if self.generation.remaining_tokens <= 0:
            self.generation.finish(FinishReason.LENGTH)
            return
        self._avoid.add(attempt.worker_id)
        self._attempts += 1
        self._moves += 1
        try:
            with span("gateway.place", attempt=self._attempts):
                placement = await self._placer.place(self._query())
        except MeshError:
            # Nobody else takes it: the worker may be back before its grace is over, as may be one avoided before it.
            self._avoid = {attempt.worker_id}
            return
        if self.generation.ended or self.generation.remaining_tokens <= 0:
            return
        GATEWAY_REPLACEMENTS.labels(Outcome.LOST.value).inc()
        self._end_attempt(Outcome.LOST)
        self.generation.begin_attempt()
        self._submit(placement)

    def _be_patient(self) -> None:
        self._patient_until = self._clock() + self._config.worker_seconds

    async def _place(self, cause: MeshError | None) -> None:
        """Place until a worker is found. `cause` is why the request is placed again, None the first time.

        The first time the scheduler's refusal is final, unless there is no worker: the mesh may be starting, or its
        only worker.
        """
        while True:
            if cause is not None:
                await self._pause(cause)
            self._attempts += 1
            try:
                with span("gateway.place", attempt=self._attempts):
                    placement = await self._placer.place(self._query())
            except MeshError as error:
                if cause is None and isinstance(error, NoWorker):
                    cause = error
                    self._be_patient()
                elif cause is None or not _passes_with_time(error):
                    raise
                # An avoided worker may have come back since, as a new incarnation or with room.
                self._avoid.clear()
                continue
            self._submit(placement)
            return

    async def _pause(self, cause: MeshError) -> None:
        """Wait before another attempt. Raises if there have been enough.

        A lost worker is started again within seconds, and attempts fail at once meanwhile: then only time is counted.
        """
        assert self._patient_until is not None
        awaited = attempt_outcome(cause) is Outcome.LOST and self._clock() < self._patient_until
        if not awaited and isinstance(cause, NoWorker):
            raise cause
        if not awaited and self._attempts - self._moves >= self._config.attempts:
            raise exhausted(cause, self._attempts)
        pause = self._config.backoff_seconds * 2 ** min(self._attempts - self._moves - 1, 16)
        await asyncio.sleep(min(pause, LONGEST_PAUSE_SECONDS))

    def _query(self) -> PlacementQuery:
        request = self.generation.request
        return PlacementQuery(
            generation_id=self._generation_id,
            request_id=request.request_id,
            attempt=self._attempts,
            model=self.generation.model,
            prompt_tokens=self.generation.next_position,
            max_tokens=self.generation.remaining_tokens,
            block_hashes=self._block_hashes,
            avoid=frozenset(self._avoid),
            share=request.share,
            sparse=request.sparse,
        )

    def _submit(self, placement: Placement) -> None:
        self.placement = placement
        self.placed_at = self.placed_at or self._clock()
        self._attempt = Attempt(
            number=self._attempts,
            worker_id=placement.decode.worker_id,
            stream=self._links.submit(placement, self._attempts, self.generation),
            began_at=self._clock(),
            received_before=self.generation.received_tokens,
        )

    def _end_attempt(self, outcome: Outcome) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.stream.cancel()
            self._placer.report(self._report(attempt, outcome, self._clock()))

    def _report(self, attempt: Attempt, outcome: Outcome, now: float) -> AttemptReport:
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


def attempt_outcome(failure: MeshError) -> Outcome:
    """What a failed attempt means: another worker may do better (LOST, REFUSED), or none will (FAILED)."""
    if failure.retry is Retry.THIS_CALL or isinstance(failure, UnknownRequest | PrefillLost):
        return Outcome.LOST
    # The decode worker and the prefill worker that was placed with it do not fit together: another pair may.
    if failure.retry is Retry.HIGHER_UP or isinstance(failure, NamespaceMismatch):
        return Outcome.REFUSED
    return Outcome.FAILED


def exhausted(cause: MeshError, attempts: int) -> MeshError:
    """The error for the client after the last attempt."""
    if attempt_outcome(cause) is Outcome.REFUSED:
        return Overloaded(
            f"no worker took the request in {attempts} attempts ({cause.message}): retry later",
            retry_after_ms=RETRY_AFTER_MS,
        )
    return WorkerLost(
        f"a worker was lost and the request could not be continued in {attempts} attempts ({cause.message}): retry",
        retry_after_ms=RETRY_AFTER_MS,
    )


def _passes_with_time(error: MeshError) -> bool:
    return error.retry in (Retry.THIS_CALL, Retry.AFTER_DELAY)
