from typing import Any

import msgspec

from mesh.domain.placement import AttemptOutcome
from scheduler.config import ObjectivesConfig
from scheduler.decisions import MOST_ANSWERS, Decision, DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.placement.candidates import Candidates, CandidateWorker
from scheduler.placement.choose import Comparison
from scheduler.placement.constants import Constants
from scheduler.placement.growth import PlacedAnswers, Times
from tests.support.scheduling import choose, make_candidate, make_request

COMPARED = Comparison(make_request(), Candidates([make_candidate()]), Constants(), ObjectivesConfig())
CHOSEN = choose(COMPARED.terms())


def make_decision(request_id: str = "r", attempt: int = 0, **changes: Any) -> Decision:
    values: dict[str, Any] = {
        "time": 0.0,
        "chosen": CHOSEN,
        "reason": "",
        "compared": msgspec.structs.replace(COMPARED, request=make_request(generation_id=request_id, attempt=attempt)),
        **changes,
    }
    return Decision(**values)


def crowded(answers: int) -> CandidateWorker:
    times = Times(range(answers))
    return make_candidate(answers=PlacedAnswers(times, times))


def compared_with(request_id: str, *workers: CandidateWorker) -> Decision:
    request = make_request(generation_id=request_id)
    return make_decision(compared=msgspec.structs.replace(COMPARED, request=request, candidates=Candidates(workers)))


def test_decisions_are_listed_newest_first_and_the_oldest_give_way() -> None:
    log = DecisionLog(capacity=3)
    for number in range(5):
        log.add(make_decision(f"r{number}"))
    assert [decision.query.request_id for decision in log.newest(10)] == ["r4", "r3", "r2"]
    assert [decision.query.request_id for decision in log.newest(1)] == ["r4"]


def test_decisions_among_many_requests_give_way_earlier() -> None:
    log = DecisionLog(capacity=10)
    for number in range(5):
        log.add(compared_with(f"r{number}", crowded(MOST_ANSWERS // 3)))
    assert [decision.query.request_id for decision in log.newest(10)] == ["r4", "r3", "r2"]
    log.add(compared_with("alone", crowded(MOST_ANSWERS + 1)))
    assert [decision.query.request_id for decision in log.newest(10)] == ["alone"]


def test_answers_that_decisions_share_are_counted_once() -> None:
    log, unchanged = DecisionLog(capacity=10), crowded(MOST_ANSWERS // 2)
    for number in range(5):
        log.add(compared_with(f"r{number}", unchanged))
    log.add(compared_with("r5", unchanged, crowded(MOST_ANSWERS // 2)))
    assert len(log.newest(10)) == 6
    log.add(compared_with("r6", crowded(1)))
    assert [decision.query.request_id for decision in log.newest(10)] == ["r6"]


def test_the_decisions_of_one_request_are_found() -> None:
    log = DecisionLog(capacity=10)
    for attempt in range(3):
        log.add(make_decision("a", attempt))
        log.add(make_decision("b", attempt))
    assert [(d.query.request_id, d.query.attempt) for d in log.newest(2, "a")] == [("a", 2), ("a", 1)]


def test_an_outcome_is_attached_once() -> None:
    log = DecisionLog(capacity=3)
    log.add(make_decision("a"))
    settled = log.settle(("a", 0), AttemptOutcome.FINISHED)
    assert settled is not None
    assert settled.outcome is AttemptOutcome.FINISHED
    assert log.settle(("a", 0), AttemptOutcome.FAILED) is None
    assert log.newest(1)[0].outcome is AttemptOutcome.FINISHED


def test_outcomes_of_unknown_forgotten_and_refused_placements_are_dropped() -> None:
    log = DecisionLog(capacity=1)
    log.add(make_decision("old"))
    log.add(make_decision("refused", chosen=None))
    assert log.settle(("old", 0), AttemptOutcome.FINISHED) is None
    assert log.settle(("refused", 0), AttemptOutcome.FINISHED) is None
    assert log.settle(("never", 0), AttemptOutcome.FINISHED) is None


def test_a_repeated_attempt_survives_the_older_one_leaving() -> None:
    log = DecisionLog(capacity=2)
    log.add(make_decision("a"))
    log.add(make_decision("a"))
    log.add(make_decision("b"))
    assert log.settle(("a", 0), AttemptOutcome.CANCELLED) is not None


def test_output_lengths_follow_what_is_reported() -> None:
    lengths = OutputLengths(smoothing=0.5)
    assert lengths.mean("m") is None
    lengths.observe("m", 100, 400)
    lengths.observe("m", 200, 200)
    assert lengths.mean("m") == 150.0
    assert lengths.mean("other") is None
    # One of the two stopped by itself; what is not known does so always.
    assert (lengths.stopping("m"), lengths.stopping("other")) == (0.5, 1.0)


def test_models_are_remembered_up_to_a_number() -> None:
    lengths = OutputLengths(max_models=1)
    lengths.observe("a", 1, 1)
    lengths.observe("b", 1, 1)
    assert lengths.mean("b") is None
