from mesh.domain.shares import Share
from scheduler.tenants import MAX_SECONDS, Placed, PlacedRequests
from tests.support.scheduling import ManualClock

BUSY, QUIET = Share("busy"), Share("quiet")


def placed_requests(count: int) -> tuple[PlacedRequests, ManualClock]:
    clock = ManualClock()
    placed = PlacedRequests(clock)
    for number in range(count):
        placed.add((f"r{number}", 1), BUSY, Placed("m", ("w",), 100))
    return placed, clock


def test_an_attempt_that_ended_twice_counts_once() -> None:
    placed, _ = placed_requests(9)
    placed.end(("r0", 1))
    placed.end(("r0", 1))
    placed.end(("unknown", 1))
    assert placed.ahead(QUIET) == 2 / 9


def test_requests_whose_end_nobody_reports_are_forgotten() -> None:
    placed, clock = placed_requests(99)
    clock.now += MAX_SECONDS + 1
    assert placed.ahead(QUIET) == 1.0
