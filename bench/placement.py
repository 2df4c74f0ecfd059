"""What a placement costs the scheduler in processor time: `python -m bench.placement`.

The mesh has workers with full prefix indexes, two thirds of them decode workers. Each reports once a second meanwhile.
The smallest mesh is the floor: a placement among a thousand workers should cost little more than one among a dozen.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from time import process_time
from typing import Annotated

import typer

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.placement import PlacementQuery
from mesh.domain.workers import PromptPace, WorkerIdentity, WorkerLoad, WorkerRole, WorkerState
from scheduler.config import LeaseConfig, ObjectivesConfig
from scheduler.coordinator import Coordinator
from scheduler.decisions import DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.live_worker import Lease
from scheduler.placement.constants import Constants
from scheduler.registry import Registry
from scheduler.stores import Stores
from scheduler.tenants import PlacedRequests

MODEL = "model"
NAMESPACE = KvNamespace("weights", "bf16", 61, "mla")
BLOCKS = 20_000
PREFIXES, PREFIX_BLOCKS, HELD_PREFIXES, FRESH_BLOCKS = 200, 40, 30, 15
# Placements in a simulated second.
RATE = 1667


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Mesh:
    """A scheduler without its services, whose workers hold blocks of a few hundred shared prefixes."""

    def __init__(self, workers: int, seed: int = 1) -> None:
        self.clock = Clock()
        self._random = Random(seed)
        constants = Constants()
        lease = LeaseConfig(gather_seconds=0.0, max_workers=workers, max_cached_blocks=workers * BLOCKS)
        self._registry = Registry(self.clock, lease, constants.costs)
        self.coordinator = Coordinator(
            self._registry,
            Stores(),
            1,
            PlacedRequests(self.clock),
            DecisionLog(2000),
            OutputLengths(),
            constants,
            ObjectivesConfig(),
            self.clock,
        )
        self._prefixes = drawn_prefixes(self._random)
        self._leases = [self._attach(number, workers) for number in range(workers)]
        self._requests = 0

    def query(self) -> PlacementQuery:
        self._requests += 1
        chain = drawn_chain(self._prefixes, self._random)
        return PlacementQuery(f"r{self._requests}", 1, MODEL, 64 * len(chain), 1000, chain)

    def report(self) -> None:
        """Report the status of a random worker."""
        lease = self._leases[self._random.randrange(len(self._leases))]
        self._registry.update(lease, WorkerState.SERVING, drawn_load(self._random))

    def _attach(self, number: int, workers: int) -> Lease:
        lease = self._registry.attach(identity_of(number, workers))
        self._registry.update(lease, WorkerState.SERVING, drawn_load(self._random))
        self._registry.record_blocks(lease, False, drawn_blocks(self._prefixes, self._random), [])
        return lease


def identity_of(number: int, workers: int) -> WorkerIdentity:
    """Worker `number` of `workers`, the first third of which are prefill workers."""
    return WorkerIdentity(
        worker_id=f"w{number:05}",
        incarnation="0",
        role=WorkerRole.PREFILL if number < workers // 3 else WorkerRole.DECODE,
        endpoint="127.0.0.1:1",
        model=MODEL,
        kv_namespace=NAMESPACE,
        context_tokens=100_000,
        total_blocks=BLOCKS,
        max_requests=64,
        can_prefill=True,
        vocabulary_size=129_280,
        worker_class="H200",
        max_step_tokens=8192,
        block_bytes=4_500_000,
    )


def drawn_load(random: Random) -> WorkerLoad:
    running, queued, rate = random.randrange(40), random.randrange(4000), random.uniform(5000, 20_000)
    return WorkerLoad(
        running_requests=running,
        queued_prefill_tokens=queued,
        free_blocks=15_000,
        prefill_tokens_per_second=rate,
        exact_prompts=PromptPace(rate),
        decode_step_ms=random.uniform(20, 40),
        mean_output_tokens=500.0,
        decode_step_requests=random.uniform(1, 40),
        push_bytes_per_second=random.uniform(1e9, 4e9),
    )


def drawn_prefixes(random: Random) -> list[list[bytes]]:
    """The prefixes that prompts begin with, as hashes of blocks."""
    return [[random.randbytes(16) for _ in range(PREFIX_BLOCKS)] for _ in range(PREFIXES)]


def drawn_blocks(prefixes: Sequence[Sequence[bytes]], random: Random) -> list[bytes]:
    """The hashes of the blocks that one worker holds."""
    return [block for _ in range(HELD_PREFIXES) for block in random.choice(prefixes)]


def drawn_chain(prefixes: Sequence[Sequence[bytes]], random: Random) -> list[bytes]:
    """A prompt's chain: a prefix that many prompts share, and an end of its own."""
    return [*random.choice(prefixes), *(random.randbytes(16) for _ in range(FRESH_BLOCKS))]


def measure(workers: int, placements: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each placement, and of each report between them, ascending."""
    return asyncio.run(_measure(Mesh(workers), workers, placements))


async def _measure(mesh: Mesh, workers: int, placements: int) -> tuple[list[float], list[float]]:
    took, reports, due = [], [], 0.0
    for _ in range(placements):
        query, start = mesh.query(), process_time()
        await mesh.coordinator.place(query)
        took.append((process_time() - start) * 1000)
        mesh.clock.now += 1 / RATE
        due += workers / RATE
        while due >= 1:
            due, start = due - 1, process_time()
            mesh.report()
            reports.append((process_time() - start) * 1000)
    return sorted(took), sorted(reports)


def main(
    workers: Annotated[list[int], typer.Option(help="Repeatable.")] = [12, 100, 1000],  # noqa: B006
    placements: int = 2000,
) -> None:
    typer.echo("workers    mean     p50     p99 ms    a second    of the first    report, ms")
    first = None
    for each in workers:
        took, reports = measure(each, placements)
        mean = sum(took) / placements
        first = first or mean
        report = sum(reports) / len(reports) if reports else 0.0
        typer.echo(
            f"{each:7}  {mean:6.3f}  {took[placements // 2]:6.3f}  {took[placements * 99 // 100]:6.3f}"
            f"  {1000 / mean:10.0f}  {mean / first:14.2f}  {report:12.4f}"
        )


if __name__ == "__main__":
    typer.run(main)
