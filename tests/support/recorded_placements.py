"""Placements of four randomly drawn meshes, each as one line, as recorded in `tests/scheduler/placements.txt`.

After an intended change of placement, `python -m tests.support.recorded_placements` writes the file again. Its lines
name the workers, so that the difference shows which requests go elsewhere.
"""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from mesh.costs import CostModel
from mesh.domain.placement import AttemptOutcome, AttemptReport, PlacementQuery
from mesh.domain.shares import Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import (
    KvNamespace,
    PromptPace,
    RankStatus,
    TransferCounters,
    WorkerLoad,
    WorkerRole,
    WorkerState,
)
from mesh.errors import MeshError
from scheduler.config import LeaseConfig, ObjectivesConfig
from scheduler.coordinator import Coordinator, ExplainedPlacement
from scheduler.decisions import Decision, DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.live_worker import Lease
from scheduler.placement.constants import Constants
from scheduler.placement.terms import Terms
from scheduler.registry import Registry
from scheduler.stores import Store, Stores, StoreStatus
from scheduler.tenants import PlacedRequests
from tests.support.scheduling import ManualClock, make_constants, make_identity

RECORD = Path("tests/scheduler/placements.txt")
PLACEMENTS = 150
PREFIXES, PREFIX_BLOCKS = 12, 24
MODEL = "oracle"
PLAIN = KvNamespace("weights", "bf16", 61, "mla")
WITH_DRAFTS = KvNamespace("weights", "bf16", 62, "mla", draft_layers=1)
CURVE = CostModel(
    decode_steps=((1.0, 15.0), (8.0, 24.0), (64.0, 40.0)),
    prefill_tokens_per_second=9000.0,
    prefill_pairs_ms=20.0,
    sparse_pairs_ms=6.0,
    push_bytes_per_second=5e9,
    request_ms=1.5,
)
SPARSE = SparsePrefill(4096, 0.95)
TENANTS = (Share("busy"), Share("busy"), Share("busy"), Share("quiet", 2.0))


@dataclass(frozen=True)
class Scene:
    """A mesh to draw. If workers are idle, all are alike; if they are busy, many refuse."""

    name: str
    prefill: int
    decode: int
    stores: bool
    ranks: Sequence[int]
    constants: Constants
    objectives: ObjectivesConfig
    use: Literal["idle", "quiet", "busy"]


SCENES = (
    Scene("pairs", 45, 60, True, (1,), Constants(), ObjectivesConfig(), "quiet"),
    Scene(
        "full",
        8,
        12,
        False,
        (1, 2),
        make_constants(costs=CURVE, queue_requests=4, interference=0.5),
        ObjectivesConfig(ttft_ms=1500.0, tpot_ms=40.0),
        "busy",
    ),
    Scene("idle", 10, 15, False, (1, 2), Constants(), ObjectivesConfig(), "idle"),
    Scene("alone", 0, 30, True, (1, 4), make_constants(costs=CURVE), ObjectivesConfig(ttft_ms=9000.0), "quiet"),
)


class DrawnStore:
    """A store that holds a part of each chain, some of it on disk. The chain's bytes say how much."""

    endpoint = "127.0.0.1:2"
    status = StoreStatus("store", (), 0, 0, 0, TransferCounters())

    async def match(self, namespace: KvNamespace, chain: Sequence[bytes]) -> StoreTarget | None:
        blocks = min(len(chain), chain[-1][0] % 32)
        return StoreTarget("store", blocks, blocks * (chain[-1][1] % 2) // 3) if blocks else None


class DrawnMesh:
    """A scheduler with workers' reports and with requests that come and end, all drawn from a seed."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self._scene, self._random, self._clock = scene, Random(seed), ManualClock()
        lease = LeaseConfig(seconds=1e6, gather_seconds=0.0)
        self._registry = Registry(self._clock, lease, scene.constants.costs)
        stores: list[Store] = [DrawnStore()] if scene.stores else []
        self._log = DecisionLog(10)
        self._coordinator = Coordinator(
            self._registry,
            Stores(stores),
            1,
            PlacedRequests(self._clock),
            self._log,
            OutputLengths(),
            scene.constants,
            scene.objectives,
            self._clock,
        )
        self._prefixes = [self._chain(PREFIX_BLOCKS) for _ in range(PREFIXES)]
        roles = [WorkerRole.PREFILL] * scene.prefill + [WorkerRole.DECODE] * scene.decode
        self._workers = [self._attach(number, role) for number, role in enumerate(roles)]
        self._under_way: list[PlacementQuery] = []

    async def lines(self) -> list[str]:
        """The line of each placement."""
        lines = []
        for number in range(PLACEMENTS):
            call, answer = self._call(number), None
            try:
                answer = await self._coordinator.place(call)
                self._under_way.append(call)
            except MeshError as error:
                assert error.message
            lines.append(line(f"{self._scene.name} {number:03}", self._log.newest(1)[0], answer))
            self._go_on()
        return lines

    def _go_on(self) -> None:
        self._clock.now += self._random.expovariate(40.0)
        for _ in range(self._random.randrange(4)):
            self._report(*self._random.choice(self._workers))
        if self._under_way and self._random.random() < 0.8:
            ended = self._under_way.pop(self._random.randrange(len(self._under_way)))
            outcome = self._random.choice(list(AttemptOutcome))
            self._coordinator.report(AttemptReport(*ended.key, outcome, self._random.randrange(1, 900)))

    def _call(self, number: int) -> PlacementQuery:
        random = self._random
        prefix = random.choice(self._prefixes)[: random.randrange(PREFIX_BLOCKS + 1)]
        chain = prefix + self._chain(random.choice((0, 1, 8, 60, 400)))
        avoid = random.sample(self._workers, random.choice((0, 0, 0, 1, 3)))
        return PlacementQuery(
            f"g{number}",
            attempt=1,
            model=MODEL,
            prompt_tokens=64 * len(chain) + random.randrange(1, 64),
            max_tokens=random.choice((16, 200, 4000)),
            avoid=frozenset(lease.worker_id for lease, _ in avoid),
            sparse=random.choice((None, SPARSE)),
            block_hashes=chain,
            share=random.choice(TENANTS),
            request_id=f"r{number}",
        )

    def _chain(self, blocks: int) -> list[bytes]:
        return [self._random.randbytes(16) for _ in range(blocks)]

    def _attach(self, number: int, role: WorkerRole) -> tuple[Lease, int]:
        """Attach a worker; returns its lease and its number of ranks."""
        random = self._random
        identity = make_identity(
            f"{role.value[0]}{number:02}",
            role=role,
            kv_namespace=random.choice((PLAIN, PLAIN, WITH_DRAFTS)),
            context_tokens=random.choice((20_000, 40_000)),
            total_blocks=4000,
            max_requests=random.choice((8, 64)),
            can_prefill=role is WorkerRole.DECODE and random.random() < 0.7,
            receives_kv=random.random() < 0.9,
            block_bytes=4_500_000,
            layerwise_tokens=random.choice((None, 2048)),
            ranks=random.choice(self._scene.ranks),
            worker_class=random.choice(("", "H200 ep8", "H100 ep8")),
            sparse_prefill=random.choice((None, SPARSE)),
        )
        lease = self._registry.attach(identity)
        self._report(lease, identity.ranks)
        held = list(dict.fromkeys(block for _ in range(3) for block in random.choice(self._prefixes)))
        holders = [random.randrange(1, 1 << identity.ranks) for _ in held] if identity.ranks > 1 else []
        self._registry.record_blocks(lease, True, held, [], holders)
        return lease, identity.ranks

    def _report(self, lease: Lease, ranks: int) -> None:
        random = self._random
        state = WorkerState.SERVING if random.random() < 0.95 else random.choice(list(WorkerState))
        statuses = [RankStatus(self._load(), self._transfers(), 0) for _ in range(ranks)]
        several = statuses if ranks > 1 else []
        self._registry.update(lease, state, statuses[0].load, statuses[0].transfers, several)
        if random.random() < 0.03:
            self._registry.detach(lease)

    def _load(self) -> WorkerLoad:
        random, busy = self._random, self._scene.use == "busy"
        if self._scene.use == "idle":
            return WorkerLoad(free_blocks=4000)
        exact = PromptPace(random.uniform(4000, 20_000), random.uniform(0, 9000)) if random.random() < 0.8 else None
        sparse = PromptPace(random.uniform(8000, 30_000), random.uniform(0, 9000)) if random.random() < 0.5 else None
        queued = random.choice((0, 0, 700, 9000))
        return WorkerLoad(
            running_requests=random.randrange(9 if busy else 6),
            waiting_requests=random.randrange(9) if busy else 0,
            queued_prefill_tokens=queued,
            queued_sparse_tokens=queued // 3 if sparse else 0,
            free_blocks=random.choice((4000, 1000, 90)),
            prefill_tokens_per_second=random.choice((None, 7000.0)),
            exact_prompts=exact,
            sparse_prompts=sparse,
            decode_step_ms=random.choice((None, random.uniform(15, 50))),
            decode_step_requests=random.uniform(1, 30),
            mean_output_tokens=random.choice((None, 300.0)),
            push_bytes_per_second=random.choice((None, random.uniform(1e9, 4e10))),
        )

    def _transfers(self) -> TransferCounters:
        random = self._random
        return TransferCounters(
            fetch_bytes_per_second=random.choice((None, random.uniform(1e9, 1e11))),
            disk_fetch_bytes_per_second=random.choice((None, random.uniform(1e8, 1e10))),
        )


def line(name: str, decision: Decision, answer: ExplainedPlacement | None) -> str:
    """Where the request goes, a hash of all of the decision but its times, and the sum of its times.

    Compare the sum as a number: the last bits of logarithms differ between C libraries.
    """
    places = "refused" if decision.chosen is None else decision.chosen.name
    told = [
        decision.reason,
        [_without_times(term) for term in decision.terms],
        [] if answer is None else sorted(answer.cached.items()),
        []
        if answer is None
        else [
            answer.placement.decode.worker_id,
            answer.placement.prefill and answer.placement.prefill.worker_id,
        ],
    ]
    digest = hashlib.blake2b(msgspec.json.encode(told), digest_size=6).hexdigest()
    return f"{name} {digest} {fsum(fsum(_times(term)) for term in decision.terms)!r} {places}"


def _times(term: Terms) -> tuple[float, ...]:
    return term.ttft_ms, term.tpot_ms, term.drain_ms, term.total_ms, term.prompt_ms


def _without_times(term: Terms) -> Terms:
    return msgspec.structs.replace(term, ttft_ms=0.0, tpot_ms=0.0, drain_ms=0.0, total_ms=0.0, prompt_ms=0.0)


def placements() -> Iterator[str]:
    """The lines of all scenes."""
    for seed, scene in enumerate(SCENES):
        yield from asyncio.run(DrawnMesh(scene, seed).lines())


if __name__ == "__main__":
    RECORD.write_text("".join(f"{each}\n" for each in placements()), encoding="utf-8")
