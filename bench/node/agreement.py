"""How long two ranks' hosts are busy agreeing on a step, each in a process of its own. Needs no GPU.

`python -m bench.node.agreement [--pauses-ms 0 20] [--evicted-mb 4] [--steps 150]`

Between steps a rank sleeps, writes other memory, so that the agreement's code leaves the processor's caches, and comes
up to 0.1 ms late, at random. The ranks propose either the same in all steps, or each something else in each step.
Printed are medians over both ranks' steps: the time without the waits for each other, and the time from the later
rank's arrival until both have agreed.
"""

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.exchange.processes import on_each_rank
from bench.node.agreement_clock import AgreementClock
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.step.shape import StepShape

LAYOUT = Layout(dp=2, ep=2)
LATEST_SECONDS = 100e-6
CACHE_LINE = 64
# The first fifth of the steps with a pause warms up and is not counted.
WARM_SHARE = 5


@dataclass(frozen=True)
class Step:
    """When the step's agreement began and ended, in seconds of a clock that both ranks share, and how long this rank's
    host was busy with it.
    """

    begun: float
    ended: float
    busy: float


def agree_on_a_core(pause_seconds: float, evicted_bytes: int, steps: int, alike: bool, peers: Peers) -> list[Step]:
    """One rank's steps, in a process that keeps to one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[peers.place.rank % len(cores)]})
    return agree(peers, pause_seconds, evicted_bytes, steps, alike)


def agree(peers: Peers, pause_seconds: float, evicted_bytes: int, steps: int, alike: bool) -> list[Step]:
    """One rank's steps. alike: whether both ranks propose the same in all of them."""
    clock, evicted, late = AgreementClock(peers), bytearray(evicted_bytes), random.Random(peers.place.rank)
    measured = []
    for step in range(steps):
        if pause_seconds:
            time.sleep(pause_seconds)
            for place in range(0, evicted_bytes, CACHE_LINE):
                evicted[place] = 1
            _spin(late.uniform(0, LATEST_SECONDS))
        clock.restart()
        begun = time.perf_counter()
        rows = 64 if alike else 64 + (step + peers.place.rank) % 3
        clock.agreement.agree(StepShape(rows, drawing=rows, decodes=True, rows=rows))
        measured.append(Step(begun, time.perf_counter(), clock.mean_seconds()))
    return measured


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pauses-ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--evicted-mb", type=float, default=4.0)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    table = Table(title="us of an agreement between two ranks")
    for column in ("pause, ms", "proposals", "a host is busy", "p90", "both have agreed"):
        table.add_column(column, justify="right")
    for pause_ms, alike in product(arguments.pauses_ms, (True, False)):
        evicted_bytes = int(arguments.evicted_mb * (1 << 20))
        act = partial(agree_on_a_core, pause_ms / 1000, evicted_bytes, arguments.steps, alike)
        counted = [steps[arguments.steps // WARM_SHARE :] for steps in on_each_rank(LAYOUT, act)]
        busy = sorted(step.busy for steps in counted for step in steps)
        together = [
            max(step.ended for step in pair) - max(step.begun for step in pair) for pair in zip(*counted, strict=True)
        ]
        times = median(busy), busy[len(busy) * 9 // 10], median(together)
        cells = (f"{seconds * 1e6:.1f}" for seconds in times)
        table.add_row(f"{pause_ms:g}", "the same" if alike else "others", *cells)
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
