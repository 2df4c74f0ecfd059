"""How many replicas are wanted, over simulated time."""

import itertools
import math
import random
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from scheduler.config import ScalingConfig
from scheduler.scaling.replicas import Need, WantedReplicas, decide

CONFIG = ScalingConfig(target_use=0.75, slack=0.15, scale_in_seconds=300.0)
# What one replica does.
REPLICA = 40.0
PERIOD_SECONDS = 15.0
DAY_SECONDS = 86_400


def followed(amounts: Iterable[float], before: int = 0, config: ScalingConfig = CONFIG) -> list[int]:
    """The replicas wanted while the load goes through these amounts, one every PERIOD_SECONDS."""
    wanted, replicas = WantedReplicas(before), []
    for step, amount in enumerate(amounts):
        wanted = decide(wanted, [Need(amount, REPLICA, "requests")], step * PERIOD_SECONDS, config)
        replicas.append(wanted.replicas)
    return replicas


def turns(replicas: list[int]) -> int:
    """How often the number goes up after it went down, or the other way round."""
    changes = [after - before for before, after in itertools.pairwise(replicas) if after != before]
    return sum((first > 0) != (second > 0) for first, second in itertools.pairwise(changes))


@given(st.floats(0.1, 5000.0), st.integers(0, 2**32), st.integers(0, 200))
def test_a_load_that_varies_within_the_slack_never_oscillates(load: float, seed: int, before: int) -> None:
    noise = random.Random(seed)
    replicas = followed((load * noise.uniform(1 - CONFIG.slack, 1.0) for _ in range(200)), before)
    assert turns(replicas) == 0
    assert replicas[-1] <= max(before, math.ceil(load / REPLICA / CONFIG.target_use))


@given(st.lists(st.floats(0.0, 10_000.0), min_size=1, max_size=100), st.integers(0, 50))
def test_there_are_always_enough_replicas_for_the_load(loads: list[float], before: int) -> None:
    for load, replicas in zip(loads, followed(loads, before), strict=True):
        assert replicas * REPLICA >= load - 0.1


@given(st.lists(st.floats(0.0, 10_000.0), min_size=1, max_size=100))
def test_fewer_are_wanted_after_fewer_were_enough_long_enough(loads: list[float]) -> None:
    replicas, steps = followed(loads), int(CONFIG.scale_in_seconds / PERIOD_SECONDS)
    for step in range(1, len(replicas)):
        if replicas[step] < replicas[step - 1]:
            window = loads[max(0, step - steps) : step + 1]
            assert len(window) == steps + 1
            assert max(window) <= (replicas[step - 1] - 1) * REPLICA * CONFIG.target_use * (1 - CONFIG.slack) + 0.1


def test_a_spike_is_followed_at_once_and_left_slowly() -> None:
    replicas = followed([30.0] * 20 + [600.0] * 4 + [30.0] * 60)
    assert replicas[19] == 1
    assert replicas[20] == 20
    # Fewer have to be enough for five minutes first.
    assert replicas[24 + 19] == 20
    assert replicas[-1] in (1, 2)
    assert turns(replicas) == 1


def test_a_daily_curve_is_followed_up_and_down_once() -> None:
    steps = int(DAY_SECONDS / PERIOD_SECONDS)
    loads = [400.0 - 360.0 * math.cos(2 * math.pi * step / steps) for step in range(steps)]
    replicas = followed(loads)
    assert turns(replicas) == 1
    assert max(replicas) == math.ceil(760 / REPLICA / CONFIG.target_use)
    assert replicas[-1] <= 3
    # On average not far above what the load takes.
    assert sum(replicas) * REPLICA * CONFIG.target_use < 1.35 * sum(loads)


def test_the_first_request_wants_a_worker() -> None:
    replicas = followed([40.0] * 10 + [0.0] * 30 + [0.2])
    assert replicas[-2] == 0
    assert replicas[-1] == 1


def test_the_scarcest_of_several_needs_decides_and_is_named() -> None:
    needs = [Need(10, 40, "requests"), Need(9000, 3000, "prompt tokens/s")]
    wanted = decide(WantedReplicas(0), needs, 0.0, CONFIG)
    assert (wanted.replicas, wanted.reason) == (4, "9000 prompt tokens/s, 3000 a replica")


def test_no_more_are_wanted_than_there_may_be() -> None:
    assert followed([1e9], config=ScalingConfig(max_replicas=8)) == [8]
