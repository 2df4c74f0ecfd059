"""How fast a worker is before it serves."""

import pytest

from engine.batch import Batch
from engine.oracle.backend import OracleBackend, OracleStep
from engine.pace.draft_depth import PRIOR
from engine.pace.first_speed import PROMPT_TOKENS, measure_speed
from engine.step.shape import StepShape
from mesh.domain.workers import PromptPace
from tests.support.engines import oracle_config
from tests.support.sleeping_clock import SleepingClock

PACE = {"step_ms": 20.0, "prefill_tokens_per_second": 1000.0}


class Watched(OracleBackend):
    """Keeps the pace that is set, by a clock that only its steps move."""

    def __init__(self, clock: SleepingClock, asynchronous: bool = False) -> None:
        super().__init__(oracle_config(total_blocks=32, oracle=PACE), clock, clock.sleep)
        self.clock = clock
        self.asynchronous = asynchronous
        self.launched: list[tuple[Batch, StepShape]] = []

    def launch(self, batch: Batch, shape: StepShape) -> OracleStep:
        self.launched.append((batch, shape))
        return super().launch(batch, shape)


def test_a_step_and_a_prompt_are_measured_apart() -> None:
    clock = SleepingClock()
    backend = Watched(clock)
    speed = measure_speed(backend, oracle_config(max_requests=64), 0, clock=clock)
    assert speed.decode_step_ms == pytest.approx(20.0) and speed.decode_step_requests == 8.0
    assert speed.prompts.tokens_per_second == pytest.approx(1000.0)
    assert (speed.prompts.context_tokens, speed.prompts.step_tokens) == (PROMPT_TOKENS / 2, PROMPT_TOKENS)
    assert {(len(batch.rows), shape.decode_only) for batch, shape in backend.launched} == {(8, True), (1, False)}


def test_rows_that_are_timed_choose_experts_of_their_own() -> None:
    backend = Watched(SleepingClock())
    measure_speed(backend, oracle_config(max_requests=64), 0, clock=backend.clock)
    decoded, computed = backend.launched[0][0].rows, backend.launched[-1][0].rows
    assert len({tuple(row.token_ids) for row in decoded}) == len(decoded) == 8
    assert len(set(computed[0].token_ids)) > PROMPT_TOKENS / 2


def test_ranks_time_steps_with_tokens_of_their_own() -> None:
    tokens: list[set[int]] = []
    for rank in range(2):
        backend = Watched(SleepingClock())
        measure_speed(backend, oracle_config(max_requests=64), 0, rank, backend.clock)
        tokens.append({row.token_ids[0] for row in backend.launched[0][0].rows})
    assert not tokens[0] & tokens[1]


def test_a_device_computes_a_whole_step_of_a_prompt() -> None:
    clock = SleepingClock()
    backend = Watched(clock, asynchronous=True)
    speed = measure_speed(backend, oracle_config(max_step_tokens=512), 0, clock=clock)
    assert speed.prompts.step_tokens == 512


def test_drafts_count_as_the_tokens_that_they_bring() -> None:
    clock = SleepingClock()
    backend = Watched(clock)
    speed = measure_speed(backend, oracle_config(drafts={"next_n": 2}, max_step_tokens=512), 0, clock=clock)
    assert speed.decode_step_ms == pytest.approx(20.0 / (1 + PRIOR[0] + PRIOR[1]))
    assert {shape.drafts for _, shape in backend.launched if shape.decode_only} == {2}


def test_an_oracle_says_the_speed_that_is_set() -> None:
    speed = OracleBackend(oracle_config(oracle=PACE)).speed
    assert speed is not None
    assert (speed.decode_step_ms, speed.prompts) == (20.0, PromptPace(1000.0))
    assert OracleBackend(oracle_config(oracle={"step_ms": 20.0})).speed is None
