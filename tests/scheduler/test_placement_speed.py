"""How long a decision takes: `python -m pytest -s tests/scheduler/test_placement_speed.py` prints it."""

import sys
from collections.abc import Callable
from random import Random
from time import perf_counter, process_time

import pytest

from mesh.domain.workers import WorkerRole, WorkerState
from scheduler.admission import Objectives
from scheduler.candidates import Candidates, PlacementKnobs
from scheduler.coordinator import Coordinator, PlacementCall
from scheduler.decisions import DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.placement import choose, predict
from scheduler.prefix_index import PrefixIndex
from scheduler.registry import Registry, RegistryLimits
from scheduler.stores import Stores
from scheduler.tenants import PlacedRequests
from tests.support.scheduling import ManualClock, make_candidate, make_identity, make_load, make_request

pytestmark = pytest.mark.benchmark


def quickest_ms(repeats: int, work: Callable[[], object]) -> float:
    def once() -> float:
        start = perf_counter()
        work()
        return (perf_counter() - start) * 1000

    return min(once() for _ in range(repeats))


def test_64_prefill_and_64_decode_workers() -> None:
    decodes = [make_candidate(f"d{number}", load=make_load(running_requests=number % 8)) for number in range(64)]
    prefills = [make_candidate(f"p{number}", cached_blocks=number % 10) for number in range(64)]
    candidates = Candidates(decodes, prefills)
    ms = quickest_ms(50, lambda: choose(predict(make_request(), candidates, PlacementKnobs())))
    sys.stdout.write(f"64 prefill and 64 decode workers: {ms:.2f} ms\n")
    assert ms < 2


async def test_1000_workers_with_full_prefix_indexes() -> None:
    """`python -m pytest -s` prints the mean and p99 of the processor's time."""
    random, clock = Random(1), ManualClock()
    registry = Registry(clock, 10.0, 0.25, RegistryLimits(workers=1000, cached_blocks=10_000_000))
    prefixes = [[random.randbytes(16) for _ in range(40)] for _ in range(200)]
    for number in range(1000):
        role = WorkerRole.PREFILL if number < 333 else WorkerRole.DECODE
        identity = make_identity(f"w{number:04}", role=role, max_requests=64, total_blocks=20_000, context_tokens=10**5)
        lease = registry.attach(identity)
        load = make_load(running_requests=random.randrange(40), free_blocks=15_000)
        registry.update(lease, WorkerState.SERVING, load)
        registry.record_blocks(lease, False, [block for _ in range(30) for block in random.choice(prefixes)], [])
    knobs, objectives = PlacementKnobs(), Objectives()
    coordinator = Coordinator(
        registry, Stores(), 1, PlacedRequests(clock), DecisionLog(2000), OutputLengths(), knobs, objectives, clock
    )
    times = []
    for number in range(500):
        chain = random.choice(prefixes) + [random.randbytes(16) for _ in range(15)]
        call = PlacementCall(f"r{number}", 1, "oracle", make_request(prompt_tokens=3500, max_tokens=1000), chain)
        start = process_time()
        await coordinator.place(call)
        times.append((process_time() - start) * 1000)
        clock.now += 0.0006
    times.sort()
    sys.stdout.write(f"1,000 workers: {sum(times) / 500:.2f} ms, p99 {times[495]:.2f} ms\n")
    assert sum(times) / 500 < 2


def test_32_workers_that_hold_all_of_2000_blocks() -> None:
    chain = [number.to_bytes(16, "big") for number in range(2000)]
    index = PrefixIndex()
    for worker in range(32):
        for block_hash in chain:
            index.add(worker, block_hash)
    ms = quickest_ms(20, lambda: index.prefixes(chain, range(32)))
    sys.stdout.write(f"a chain of 2,000 blocks that 32 workers hold: {ms:.2f} ms\n")
    assert ms < 2
