"""Prompts that all ranks compute together go one after another."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.oracle.backend import OracleBackend
from engine.pace.pacing import Pacing
from engine.pace.turns import LONG_PROMPT, MOST_STEPS, Turns
from engine.parallel.config import ParallelConfig
from engine.plan.step_plan import PromptsAhead
from engine.step.shape import StepShape
from tests.support.engines import oracle_config


@dataclass
class Rank:
    """Its prompts: when each comes, and in how many chunks it is computed."""

    turns: Turns
    prompts: list[tuple[int, int]]
    begun: int = 0
    ended: list[int] = field(default_factory=list)

    def computes(self, step: int) -> bool:
        return bool(self.prompts) and self.prompts[0][0] <= step and self.turns.open

    def compute(self, step: int) -> None:
        self.begun += 1
        if self.begun == self.prompts[0][1]:
            self.prompts.pop(0)
            self.begun = 0
            self.ended.append(step)

    def left(self, step: int) -> tuple[bool, bool]:
        return bool(self.prompts) and self.prompts[0][0] <= step, self.begun > 0


def run(ranks: list[Rank], steps: int) -> list[int]:
    """Each step's number of ranks that computed a chunk."""
    counts = []
    for step in range(steps):
        computing = [rank for rank in ranks if rank.computes(step)]
        for rank in computing:
            rank.compute(step)
        left = [rank.left(step) for rank in ranks]
        shape = StepShape(
            1,
            decode_only=not computing,
            decodes=True,
            dividing=sum(own for own, _ in left),
            begun=sum(begun for _, begun in left),
        )
        for rank, (own, begun) in zip(ranks, left, strict=True):
            rank.turns = rank.turns.proposing(own, begun).after(shape)
        counts.append(len(computing))
    return counts


def ranks_of(*prompts: list[tuple[int, int]]) -> list[Rank]:
    return [Rank(Turns(len(prompts), number), list(each)) for number, each in enumerate(prompts)]


prompts = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=3).map(sorted)


@given(st.lists(prompts, min_size=2, max_size=5))
def test_every_prompt_is_computed_and_few_at_once(each: list[list[tuple[int, int]]]) -> None:
    ranks = ranks_of(*each)
    counts = run(ranks, 600)
    assert not any(rank.prompts for rank in ranks)
    # Only prompts that come in the same step may begin in the same step.
    together = [count for count in counts if count > 1]
    comes = [at for prompts in each for at, _ in prompts]
    assert len(together) <= len(comes) - len(set(comes))


def test_a_prompt_alone_never_waits() -> None:
    (rank, _) = ranks = ranks_of([(3, 5)], [])
    run(ranks, 20)
    assert rank.ended == [7]


def test_a_prompt_that_has_begun_is_ended_first() -> None:
    first, second, _ = ranks = ranks_of([(0, 5)], [(1, 2)], [])
    run(ranks, 20)
    assert (first.ended, second.ended) == ([4], [6])


def test_a_very_long_prompt_leaves_others_their_turn() -> None:
    long, short = ranks = ranks_of([(0, 200)], [(1, 2)])
    run(ranks, 300)
    assert short.ended[0] <= 2 * MOST_STEPS + 4 and long.ended[0] < 210


@pytest.mark.parametrize(
    ("aim", "ranks", "long_tokens"), [("balanced", 2, LONG_PROMPT), ("throughput", 2, None), ("balanced", 1, None)]
)
def test_ranks_take_turns_where_answers_must_not_wait(aim: str, ranks: int, long_tokens: int | None) -> None:
    config = oracle_config(aim=aim, parallel=ParallelConfig(dp=ranks))
    limits = Pacing(config, OracleBackend(config)).limits(1, PromptsAhead(4000, 1))
    assert (limits.long_tokens, limits.turn) == (long_tokens, True)
