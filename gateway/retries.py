"""Decides whether and when a request is placed again. Pure: the clock is passed in."""

from collections.abc import Callable

from gateway.config import DispatchConfig
from mesh.domain.placement import AttemptOutcome
from mesh.errors import (
    MeshError,
    NamespaceMismatch,
    NoWorker,
    Overloaded,
    PrefillLost,
    Retry,
    SchedulerUnavailable,
    UnknownRequest,
    WorkerLost,
)

RETRY_AFTER_MS = 1000
LONGEST_PAUSE_SECONDS = 0.5
# A scheduler is started again, or goes on, within seconds, however long workers take for their weights.
MOST_SCHEDULER_SECONDS = 10.0


class Retries:
    """The attempts of one request, and the workers that it avoids.

    A lost worker is started again within seconds, and attempts fail at once meanwhile. So until `worker_seconds` are
    over only time counts; after that the number of attempts counts too.
    """

    __slots__ = ("_clock", "_config", "_moves", "_patient_until", "attempts", "avoid")

    def __init__(self, config: DispatchConfig, clock: Callable[[], float]) -> None:
        self.attempts = 0
        self.avoid: frozenset[str] = frozenset()
        self._config = config
        self._clock = clock
        # Attempts that were made because a worker could not be reached.
        self._moves = 0
        # Until this time the request is placed again, however often its workers are lost or missing; None before the
        # first failure.
        self._patient_until: float | None = None

    def begin(self, *, moves: bool = False) -> None:
        """Note that an attempt begins. moves: it leaves a worker that cannot be reached, which does not count as a
        failure.
        """
        self.attempts += 1
        self._moves += moves

    def note_failure(self, *, answered: bool) -> None:
        """Note that an attempt failed. answered: it had brought tokens, so its worker was alive."""
        if self._patient_until is None or answered:
            self._be_patient(self._config.worker_seconds)

    def settle_refusal(self, refusal: MeshError, cause: MeshError | None) -> MeshError:
        """Handle a refusal of the scheduler. Returns why the request is placed again; raises the refusal if it is
        final.

        For a first placement (`cause` is None) every refusal but these is final. NoWorker may only mean that the mesh,
        or its only worker, is starting, SchedulerUnavailable that the only scheduler is. A scheduler that is back may
        know no worker yet. Overloaded is final as well for a request that has only waited for these.
        """
        if isinstance(refusal, NoWorker) and (cause is None or isinstance(cause, SchedulerUnavailable)):
            cause = refusal
            self._be_patient(self._config.worker_seconds)
        elif cause is None and isinstance(refusal, SchedulerUnavailable):
            cause = refusal
            self._be_patient(min(self._config.worker_seconds, MOST_SCHEDULER_SECONDS))
        elif (
            cause is None
            or refusal.retry not in (Retry.THIS_CALL, Retry.AFTER_DELAY)
            or (isinstance(refusal, Overloaded) and isinstance(cause, NoWorker | SchedulerUnavailable))
        ):
            raise refusal
        # An avoided worker may be back by now, as a new incarnation or with room.
        self.avoid = frozenset()
        return cause

    def pause_seconds(self, cause: MeshError) -> float:
        """Seconds to wait before another attempt. Raises if there have been enough."""
        assert self._patient_until is not None
        awaited = attempt_outcome(cause) is AttemptOutcome.LOST and self._clock() < self._patient_until
        if not awaited and isinstance(cause, NoWorker | SchedulerUnavailable):
            raise cause
        failed = self.attempts - self._moves
        if not awaited and failed >= self._config.attempts:
            raise exhausted(cause, self.attempts)
        return min(self._config.backoff_seconds * 2.0 ** min(failed - 1, 16), LONGEST_PAUSE_SECONDS)

    def _be_patient(self, seconds: float) -> None:
        self._patient_until = self._clock() + seconds


def attempt_outcome(failure: MeshError) -> AttemptOutcome:
    """Classifies a failed attempt: another worker may do better (LOST, REFUSED), or none will (FAILED)."""
    if failure.retry is Retry.THIS_CALL or isinstance(failure, UnknownRequest | PrefillLost):
        return AttemptOutcome.LOST
    # NamespaceMismatch: the decode worker and its prefill worker do not fit together, but another pair may.
    if failure.retry is Retry.HIGHER_UP or isinstance(failure, NamespaceMismatch):
        return AttemptOutcome.REFUSED
    return AttemptOutcome.FAILED


def exhausted(cause: MeshError, attempts: int) -> MeshError:
    """The error for the client after the last attempt."""
    if attempt_outcome(cause) is AttemptOutcome.REFUSED:
        return Overloaded(
            f"no worker took the request in {attempts} attempts ({cause.message}): retry later",
            retry_after_ms=RETRY_AFTER_MS,
        )
    return WorkerLost(
        f"a worker was lost and the request could not be continued in {attempts} attempts ({cause.message}): retry",
        retry_after_ms=RETRY_AFTER_MS,
    )
