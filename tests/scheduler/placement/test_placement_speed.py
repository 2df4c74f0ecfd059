"""How long a decision takes: `python -m pytest -s tests/scheduler/placement/test_placement_speed.py` prints it."""

import sys
from collections.abc import Callable
from time import perf_counter

import pytest

from bench.placement import measure
from scheduler.placement.candidates import Candidates
from scheduler.placement.constants import Constants
from scheduler.placement.predict import predict
from scheduler.prefix_index import PrefixIndex
from tests.support.scheduling import choose, make_candidate, make_load, make_request

pytestmark = pytest.mark.benchmark


def once_ms(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return (perf_counter() - start) * 1000


def quickest_ms(repeats: int, work: Callable[[], object]) -> float:
    return min(once_ms(work) for _ in range(repeats))


def reference_work() -> None:
    """Calls, floats and tuples that take an idle core a millisecond."""
    total = (0.0, 0)
    for number in range(4000):
        total = (max(total[0], number / 3) * 0.5, total[1] + 1)


def in_reference_works(repeats: int, work: Callable[[], object]) -> float:
    """How many times as long as `reference_work` it takes: whatever slows the machine slows both. Of each the quickest
    run counts, in which no other process had the core.
    """
    return quickest_ms(repeats, work) / quickest_ms(repeats, reference_work)


def test_64_prefill_and_64_decode_workers() -> None:
    decodes = [make_candidate(f"d{number}", load=make_load(running_requests=number % 8)) for number in range(64)]
    prefills = [make_candidate(f"p{number}", cached_blocks=number % 10) for number in range(64)]
    candidates = Candidates(decodes, prefills)
    times = in_reference_works(50, lambda: choose(predict(make_request(), candidates, Constants())))
    sys.stdout.write(f"64 prefill and 64 decode workers: about {times:.2f} ms\n")
    assert times < 2


def test_1000_workers_with_full_prefix_indexes() -> None:
    """`python -m bench.placement` prints more."""
    times, _ = measure(1000, 200)
    sys.stdout.write(f"1,000 workers: {sum(times) / 200:.2f} ms, p99 {times[198]:.2f} ms\n")
    assert sum(times) / 200 < 20


def test_32_workers_that_hold_all_of_2000_blocks() -> None:
    chain = [number.to_bytes(16, "big") for number in range(2000)]
    index = PrefixIndex()
    for worker in range(32):
        for block_hash in chain:
            index.add(worker, block_hash)

    def look_up() -> list[int]:
        holders = index.holders(chain)
        return [holders.prefix(worker) for worker in range(32)]

    ms = quickest_ms(20, look_up)
    sys.stdout.write(f"a chain of 2,000 blocks that 32 workers hold: {ms:.2f} ms\n")
    assert ms < 2
