"""What a worker of several DP ranks gains if prompts wait for those of other ranks, on the oracle backend.

    python -m bench.prompt_alignment

Each rank decodes the same number of requests all the time; when a request ends, another with a new prompt follows. A
prompt holds up the steps of all ranks, as it would at the exchange of experts. Ranks are threads of one process that
meet before every step. By their own simulated clock a step lasts as long as its slowest rank, so that the machine's
speed does not matter.
"""

import argparse
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from statistics import mean, median
from threading import Barrier

from rich.console import Console
from rich.table import Table

from engine.config import EngineConfig
from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.oracle.config import OracleConfig
from engine.parallel.config import ParallelConfig
from engine.protocol.messages import Submit
from engine.step.agreement import agreed, packed
from engine.step.shape import StepShape
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions

STEP_MS = 25.0
PREFILL_TOKENS_PER_SECOND = 9_500.0
VOCABULARY = 1000


@dataclass
class SteppedClock:
    """The time of all ranks. A step ends when its slowest rank has finished."""

    now: float = 0.0
    # When each rank would end the step under way.
    ends: list[float] = field(default_factory=list)


class PromptRendezvous:
    """How ranks that are threads of one process agree on a step."""

    def __init__(self, clock: SteppedClock, ranks: int) -> None:
        self._clock = clock
        self._proposals = [StepShape(0)] * ranks
        self._arrive = Barrier(ranks, self._begin_step)
        self._read = Barrier(ranks)

    def agree(self, rank: int, proposal: StepShape) -> StepShape:
        self._proposals[rank] = proposal
        self._arrive.wait()
        first, *others = self._proposals
        shape = reduce(agreed, map(packed, others), first)
        self._read.wait()
        return shape

    def _begin_step(self) -> None:
        self._clock.now = max([self._clock.now, *self._clock.ends])
        self._clock.ends.clear()


class RankAgreement:
    """engine.step.agreement.Agreement of one rank."""

    due = False

    def __init__(self, rendezvous: PromptRendezvous, rank: int) -> None:
        self._rendezvous, self._rank = rendezvous, rank

    def agree(self, proposal: StepShape) -> StepShape:
        return self._rendezvous.agree(self._rank, proposal)


@dataclass(frozen=True)
class Load:
    ranks: int
    requests_a_rank: int
    prompt_tokens: int
    answer_tokens: int
    steps: int


@dataclass
class Seen:
    """What clients of one rank see. Times are in seconds."""

    first_tokens: list[float] = field(default_factory=list)
    finished: int = 0
    ended_at: float = 0.0


def run(load: Load, wait_steps: int) -> list[Seen]:
    """Run the load on all ranks; returns what clients of each rank see."""
    clock = SteppedClock()
    rendezvous = PromptRendezvous(clock, load.ranks)
    with ThreadPoolExecutor(load.ranks) as pool:
        return list(pool.map(lambda rank: _run_rank(load, wait_steps, rank, clock, rendezvous), range(load.ranks)))


def _run_rank(load: Load, wait_steps: int, rank: int, clock: SteppedClock, rendezvous: PromptRendezvous) -> Seen:
    blocks = load.requests_a_rank * (-(-(load.prompt_tokens * 2 + load.answer_tokens * 2) // 64) + 1)
    config = EngineConfig(
        backend="oracle",
        total_blocks=blocks,
        max_requests=load.requests_a_rank,
        max_step_tokens=8192,
        prefix_cache=False,
        parallel=ParallelConfig(dp=load.ranks, prompt_wait_steps=wait_steps, context_parallel_tokens=None),
        oracle=OracleConfig(step_ms=STEP_MS, prefill_tokens_per_second=PREFILL_TOKENS_PER_SECOND),
    )
    backend = OracleBackend(config, lambda: clock.now, lambda seconds: clock.ends.append(clock.now + seconds))
    engine = Engine(config, backend, lambda: clock.now, agreement=RankAgreement(rendezvous, rank))
    source, seen, asked = random.Random(rank), Seen(), dict[int, float]()

    def ask() -> None:
        key = len(asked)
        asked[key] = clock.now
        prompt = source.choices(range(VOCABULARY), k=int(load.prompt_tokens * source.uniform(0.5, 1.5)))
        answer = int(load.answer_tokens * source.uniform(0.5, 1.5))
        engine.submit(Submit(key, TokenRequest(str(key), prompt, Sampling(), StopConditions(answer))))

    for _ in range(load.requests_a_rank):
        ask()
    for _ in range(load.steps):
        result = engine.step()
        for output in result.outputs if result is not None else ():
            if output.cached_tokens is not None:
                seen.first_tokens.append(max([clock.now, *clock.ends]) - asked[output.key])
            if output.finish is not None:
                seen.finished += 1
                ask()
    seen.ended_at = clock.now
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts of several ranks begun together, against each at once.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--requests", type=int, default=32, help="on each rank")
    parser.add_argument("--isl", type=int, default=1000)
    parser.add_argument("--osl", type=int, default=500)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--waits", type=int, nargs="+", default=[0, 2, 4, 8, 16, 32])
    options = parser.parse_args()
    load = Load(options.ranks, options.requests, options.isl, options.osl, options.steps)
    table = Table(title=f"{load.ranks} ranks of {load.requests_a_rank} requests", title_justify="left")
    for heading in ("steps waited at most", "requests a minute", "first token ms, median", "95%", "step ms, mean"):
        table.add_column(heading, justify="right")
    for wait in options.waits:
        table.add_row(str(wait), *_figures(run(load, wait), load))
    Console(highlight=False).print(table)


def _figures(ranks: list[Seen], load: Load) -> tuple[str, ...]:
    seconds = ranks[0].ended_at
    # Leave out the first requests of all ranks, which arrive at once.
    first_tokens = sorted(each for seen in ranks for each in seen.first_tokens[load.requests_a_rank :])
    return (
        f"{60 * mean(seen.finished for seen in ranks) * load.ranks / seconds:,.0f}",
        f"{1000 * median(first_tokens):,.0f}",
        f"{1000 * first_tokens[int(0.95 * len(first_tokens))]:,.0f}",
        f"{1000 * seconds / load.steps:.1f}",
    )


if __name__ == "__main__":
    main()
