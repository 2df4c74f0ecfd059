import pytest

from gateway.config import DispatchConfig
from gateway.retries import LONGEST_PAUSE_SECONDS, MOST_SCHEDULER_SECONDS, Retries, attempt_outcome
from mesh.domain.placement import AttemptOutcome
from mesh.errors import (
    ContextExceeded,
    MeshError,
    NamespaceMismatch,
    NoWorker,
    Overloaded,
    PrefillLost,
    SchedulerUnavailable,
    UnknownRequest,
    WorkerFull,
    WorkerLost,
)

CONFIG = DispatchConfig(attempts=3, backoff_seconds=0.1, worker_seconds=10.0)
LOST, FULL, NONE = WorkerLost("gone"), WorkerFull("full"), NoWorker("none")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(clock: Clock, attempts: int = 1) -> Retries:
    """Retries after this many attempts, the first of which has failed just now."""
    retries = Retries(CONFIG, clock)
    for _ in range(attempts):
        retries.begin()
    retries.note_failure(answered=False)
    return retries


def test_pauses_double_up_to_the_longest() -> None:
    retries = begun(Clock())
    pauses = []
    for _ in range(5):
        pauses.append(retries.pause_seconds(LOST))
        retries.begin()
    assert pauses == [0.1, 0.2, 0.4, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]


def test_no_attempts_count_while_a_worker_may_return() -> None:
    clock = Clock()
    retries = begun(clock, attempts=50)
    clock.now = 9.9
    retries.pause_seconds(LOST)
    clock.now = 10.0
    with pytest.raises(WorkerLost, match="in 50 attempts"):
        retries.pause_seconds(LOST)


def test_attempts_at_workers_without_room_are_counted_from_the_first() -> None:
    begun(Clock(), attempts=2).pause_seconds(FULL)
    with pytest.raises(Overloaded, match="in 3 attempts"):
        begun(Clock(), attempts=3).pause_seconds(FULL)


def test_time_begins_anew_only_behind_a_worker_that_answered() -> None:
    for answered in (False, True):
        clock = Clock()
        retries = begun(clock, attempts=3)
        clock.now = 9.0
        retries.note_failure(answered=answered)
        clock.now = 11.0
        if answered:
            retries.pause_seconds(LOST)
        else:
            with pytest.raises(WorkerLost):
                retries.pause_seconds(LOST)


def test_leaving_an_unreachable_worker_is_no_failed_attempt() -> None:
    retries = begun(Clock(), attempts=2)
    retries.begin(moves=True)
    assert retries.attempts == 3
    assert retries.pause_seconds(FULL) == 0.2


def test_no_worker_is_waited_for_and_then_told_of() -> None:
    clock = Clock()
    retries = Retries(CONFIG, clock)
    retries.begin()
    assert retries.settle_refusal(NONE, None) is NONE
    retries.pause_seconds(NONE)
    clock.now = 10.0
    with pytest.raises(NoWorker):
        retries.pause_seconds(NONE)


def test_a_scheduler_is_waited_for_seconds_and_then_told_of() -> None:
    clock, gone = Clock(), SchedulerUnavailable("no answer")
    retries = Retries(DispatchConfig(worker_seconds=120.0), clock)
    retries.begin()
    assert retries.settle_refusal(gone, None) is gone
    clock.now = MOST_SCHEDULER_SECONDS - 0.1
    retries.pause_seconds(gone)
    clock.now = MOST_SCHEDULER_SECONDS
    with pytest.raises(SchedulerUnavailable):
        retries.pause_seconds(gone)
    # Back, it knows no worker yet.
    assert retries.settle_refusal(NONE, gone) is NONE
    clock.now = MOST_SCHEDULER_SECONDS + 119.9
    retries.pause_seconds(retries.settle_refusal(gone, NONE))


@pytest.mark.parametrize("refusal", [Overloaded("full"), ContextExceeded("long")])
def test_any_other_refusal_of_a_first_placement_is_final(refusal: MeshError) -> None:
    with pytest.raises(type(refusal)):
        Retries(CONFIG, Clock()).settle_refusal(refusal, None)


@pytest.mark.parametrize("cause", [NONE, SchedulerUnavailable("no answer")])
def test_a_request_that_waited_is_told_of_a_full_mesh(cause: MeshError) -> None:
    retries = Retries(CONFIG, Clock())
    retries.begin()
    retries.settle_refusal(cause, None)
    with pytest.raises(Overloaded):
        retries.settle_refusal(Overloaded("full"), cause)


def test_a_request_under_way_outlives_refusals_that_pass_with_time() -> None:
    retries = begun(Clock())
    retries.avoid |= {"a"}
    assert retries.settle_refusal(Overloaded("full"), LOST) is LOST
    # The worker may be back.
    assert not retries.avoid
    with pytest.raises(ContextExceeded):
        retries.settle_refusal(ContextExceeded("long"), LOST)


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (LOST, AttemptOutcome.LOST),
        (UnknownRequest("restarted"), AttemptOutcome.LOST),
        (PrefillLost("gone"), AttemptOutcome.LOST),
        (FULL, AttemptOutcome.REFUSED),
        (NamespaceMismatch("other weights"), AttemptOutcome.REFUSED),
        (ContextExceeded("long"), AttemptOutcome.FAILED),
        (MeshError("bug"), AttemptOutcome.FAILED),
    ],
)
def test_what_a_failure_says_of_other_workers(failure: MeshError, outcome: AttemptOutcome) -> None:
    assert attempt_outcome(failure) is outcome
