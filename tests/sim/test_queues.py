"""The simulator against queues whose answers are known."""

from itertools import pairwise

import pytest

from sim.simulation import SimulatedMesh
from tests.support.simulation import make_fleet, make_workload, ran

STEP_SECONDS = 0.02
# One request at a time, which takes 20 ms a token after a prompt of 2 tokens in 0.4 ms.
ONE_SERVER = {
    "decode": {"replicas": 1, "max_requests": 1, "total_blocks": 4096},
    "scheduler": {"placement": {"queue_requests": 100_000}, "objectives": {}},
    "decode_queue": {"waiting_requests": 100_000},
}
PROMPT_SECONDS = 2 / 5000
SECONDS = 8000


def waits(mesh: SimulatedMesh) -> list[tuple[float, float, float]]:
    """Arrival, time in the system and time of service of each request, in the order of their arrivals."""
    lives = sorted(mesh.ended, key=lambda live: live.record.scheduled_s)
    found = []
    for live in lives:
        assert live.record.finished_s is not None
        service = PROMPT_SECONDS + (live.tokens - 1) * STEP_SECONDS
        found.append((live.record.scheduled_s, live.record.finished_s - live.record.scheduled_s, service))
    return found


def test_one_server_follows_lindleys_recursion() -> None:
    mesh, _ = ran(make_fleet(**ONE_SERVER), make_workload(2.0, prompt={"mean": 2}, output={"mean": 10}, seconds=200))
    for (before, sojourn, _), (arrival, found, service) in pairwise(waits(mesh)):
        waiting = max(0.0, before + sojourn - arrival)
        assert found == pytest.approx(waiting + service, abs=1e-6)


@pytest.mark.check("queues")
@pytest.mark.parametrize("kind", ["fixed", "exponential"])
def test_the_mean_time_in_the_system_is_the_formulas(kind: str) -> None:
    """M/D/1 and M/M/1 at a third of their capacity, by Pollaczek and Khinchine with the drawn times' two moments."""
    mesh, _ = ran(
        make_fleet(**ONE_SERVER),
        make_workload(1.6, prompt={"mean": 2}, output={"mean": 11, "kind": kind}, seconds=SECONDS, seed=7),
    )
    found = waits(mesh)
    rate = len(found) / SECONDS
    mean = sum(service for _, _, service in found) / len(found)
    square = sum(service**2 for _, _, service in found) / len(found)
    expected = mean + rate * square / (2 * (1 - rate * mean))
    assert sum(sojourn for _, sojourn, _ in found) / len(found) == pytest.approx(expected, rel=0.02)
