"""The host's work in a step while experts move, with a look at one layer's balance on the same host as the unit.

A slow or busy machine therefore does not fail. `python -m pytest -s tests/engine/balance/test_balance_speed.py` prints
the figures.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, median
from time import thread_time

import pytest
import torch

from engine.balance.config import BalanceConfig
from engine.balance.placement import first_placement, imbalance
from engine.exchange.alone import Alone
from engine.model.expert_slots import BalancedLayer, ExpertSlots
from engine.parallel.layout import Layout, Place
from engine.runner.balancer import Balancer

pytestmark = pytest.mark.benchmark
CPU = torch.device("cpu")
# R1's layers and experts, and the steps between two looks.
LAYERS, EXPERTS, INTERVAL = 58, 256, 64
# A step may take as long as this many looks at one layer, on average.
MOST_LOOKS = 8


@pytest.mark.parametrize(("parts", "redundant"), [(2, 0), (4, 2), (8, 2)])
def test_experts_of_r1_move_for_loads_of_zipfs_law(tmp_path: Path, parts: int, redundant: int) -> None:
    placement = first_placement(EXPERTS, parts, redundant)
    # One number stands for an expert's weights, since the host's time does not depend on their size.
    layers = [BalancedLayer(ExpertSlots(placement, 0, CPU), [torch.zeros(placement.slots, 1)]) for _ in range(LAYERS)]
    # This rank stands alone: the other ranks' loads would change nothing.
    exchange = Alone()
    exchange.place = Place(Layout(dp=parts, ep=parts), 0)
    config = BalanceConfig(interval_steps=INTERVAL, redundant=redundant, threshold=0.02, placement_file=tmp_path / "p")
    balancer = Balancer(dict(enumerate(layers)), exchange, config, groups=8)
    drawn = random.Random(0)
    for layer in layers:
        layer.slots.chosen += torch.tensor(zipf(drawn))
    loads = zipf(drawn)
    steps_ms: list[float] = []
    looks_ms: list[float] = []
    moved = [0]
    while len(steps_ms) < 3 * INTERVAL or moved[-1] > moved[-3 * INTERVAL]:
        steps_ms.append(spent_ms(balancer.before_step))
        looks_ms.append(spent_ms(lambda: imbalance(placement, loads)))
        moved.append(0 if balancer.report is None else balancer.report.moved)
    last = moved.index(moved[-1])
    ms, look_ms = sorted(steps_ms[:last]), median(looks_ms)
    sys.stdout.write(
        f"{parts} parts, {redundant} redundant: {moved[-1]} slots in {last} steps, ms a step: mean {mean(ms):.3f},"
        f" median {median(ms):.3f}, 99% {ms[-len(ms) // 100]:.3f}, longest {ms[-1]:.3f}; a look {look_ms:.3f}\n"
    )
    assert mean(ms) < MOST_LOOKS * look_ms


def spent_ms(work: Callable[[], object]) -> float:
    """Milliseconds of processor time that this thread took for the work."""
    started = thread_time()
    work()
    return (thread_time() - started) * 1000


def zipf(drawn: random.Random) -> Sequence[int]:
    loads = [100_000 // (1 + expert) for expert in range(EXPERTS)]
    drawn.shuffle(loads)
    return loads
