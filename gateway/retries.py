"""Whether and when a request is placed again: pure, with a clock passed in."""

from collections.abc import Callable

from gateway.config import DispatchConfig
from gateway.placement import Outcome
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

RETRY_AFTER_MS = 1000
LONGEST_PAUSE_SECONDS = 0.5


class Retries:
    """The attempts of one request, and the workers that it avoids.

    A lost worker is started again within seconds, and attempts fail at once meanwhile: until `worker_seconds` are over
    only time is counted, and attempts from then on.
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
        # first time.
        self._patient_until: float | None = None

    def begin(self, *, moves: bool = False) -> None:
        """Another attempt begins. moves: it leaves a worker that cannot be reached, which counts as no failure."""
        self.attempts += 1
        self._moves += moves

    def note_failure(self, *, answered: bool) -> None:
        """An attempt failed. answered: only after it had brought tokens, so its worker was there."""
        if self._patient_until is None or answered:
            self._be_patient()

    def settle_refusal(self, refusal: MeshError, cause: MeshError | None) -> MeshError:
        """The scheduler placed the request nowhere. Returns why it is placed again; raises the refusal if it is final.

        The first time, when there is no `cause` yet, every refusal is final but NoWorker: the mesh may be starting, or
        its only worker.
        """
        if cause is None and isinstance(refusal, NoWorker):
            cause = refusal
            self._be_patient()
        elif cause is None or refusal.retry not in (Retry.THIS_CALL, Retry.AFTER_DELAY):
            raise refusal
        # An avoided worker may have come back since, as a new incarnation or with room.
        self.avoid = frozenset()
        return cause

    def pause_seconds(self, cause: MeshError) -> float:
        """How long to wait before another attempt. Raises if there have been enough."""
        assert self._patient_until is not None
        awaited = attempt_outcome(cause) is Outcome.LOST and self._clock() < self._patient_until
        if not awaited and isinstance(cause, NoWorker):
            raise cause
        failed = self.attempts - self._moves
        if not awaited and failed >= self._config.attempts:
            raise exhausted(cause, self.attempts)
        return min(self._config.backoff_seconds * 2.0 ** min(failed - 1, 16), LONGEST_PAUSE_SECONDS)

    def _be_patient(self) -> None:
        self._patient_until = self._clock() + self._config.worker_seconds


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
