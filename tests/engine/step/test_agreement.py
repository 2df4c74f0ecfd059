"""A rank that keeps step with others: dummy steps if it has no work, shapes larger than its own, a common end."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import Batch
from engine.config import MOST_REQUESTS, MOST_STEP_TOKENS
from engine.drafts.config import MOST_DRAFTS
from engine.engine import Engine
from engine.oracle.backend import OracleBackend, OracleStep
from engine.oracle.tokens import oracle_tokens
from engine.pace.tails import SPARE_ROWS
from engine.protocol.messages import Cancel
from engine.step.agreement import PACKED_BITS, agreed, packed
from engine.step.shape import StepShape
from mesh.domain.workers import MAX_RANKS
from tests.support.engines import (
    VOCABULARY,
    DeferredOracle,
    Others,
    Transcript,
    assert_at_rest,
    oracle_config,
    prompt_of,
    submit_of,
)


def recording(backend_type: type[OracleBackend], total_blocks: int = 16) -> Any:
    class Recording(backend_type):  # type: ignore[valid-type, misc]
        launches: list[tuple[int, StepShape]]

        def launch(self, batch: Batch, shape: StepShape) -> OracleStep:
            self.launches.append((len(batch.rows), shape))
            return super().launch(batch, shape)

    backend = Recording(oracle_config(total_blocks=total_blocks))
    backend.launches = []
    return backend


@pytest.fixture(params=[OracleBackend, DeferredOracle])
def backend(request: pytest.FixtureRequest) -> Any:
    return recording(request.param)


def engine_beside(backend: Any, others: Others) -> Engine:
    return Engine(oracle_config(total_blocks=16), backend, lambda: 0.0, agreement=others)


def shape_of(size: int, drafts: int, *, decode_only: bool, owes: bool = False, **others: Any) -> StepShape:
    """size: rows if all of them decode, otherwise tokens."""
    rows = size % (MOST_REQUESTS + SPARE_ROWS) if decode_only else 0
    tokens = rows * (1 + drafts) if decode_only else size
    return StepShape(tokens, decode_only, drafts=drafts, rows=rows, owes=owes and decode_only, **others)


SHAPES = st.builds(
    shape_of,
    st.integers(0, MOST_STEP_TOKENS),
    decode_only=st.booleans(),
    stopping=st.booleans(),
    drafts=st.integers(0, MOST_DRAFTS),
    drawing=st.integers(0, MOST_REQUESTS),
    beginning=st.integers(0, MOST_REQUESTS),
    waiting_prompts=st.integers(0, MAX_RANKS),
    decodes=st.booleans(),
    prefills=st.booleans(),
    owes=st.booleans(),
    # As one rank proposes them.
    dividing=st.integers(0, 1),
    begun=st.integers(0, 1),
)


@given(SHAPES, SHAPES, st.integers(0, 3))
def test_the_agreed_shape_is_the_least_that_holds_both(one: StepShape, other: StepShape, above: int) -> None:
    assert packed(other) < 1 << PACKED_BITS
    assert agreed(one, packed(other) | above << PACKED_BITS) == StepShape(
        max(one.tokens, other.tokens),
        decode_only=one.decode_only and other.decode_only,
        stopping=one.stopping and other.stopping,
        drafts=max(one.drafts, other.drafts),
        drawing=max(one.drawing, other.drawing),
        beginning=max(one.beginning, other.beginning),
        waiting_prompts=one.waiting_prompts + other.waiting_prompts,
        decodes=one.decodes or other.decodes,
        prefills=one.prefills or other.prefills,
        rows=max(one.rows, other.rows),
        owes=one.decode_only and other.decode_only and (one.owes or other.owes),
        dividing=one.dividing + other.dividing,
        begun=one.begun + other.begun,
    )


def test_a_rank_without_work_runs_a_dummy_while_others_compute(backend: Any) -> None:
    engine = engine_beside(backend, Others([300, 1]))
    assert engine.step() is None and engine.step() is None
    assert backend.launches == [(0, StepShape(300, False)), (0, StepShape(1, True))]
    assert engine.step() is None
    assert len(backend.launches) == 2
    assert_at_rest(engine)


def test_dummies_before_and_between_requests_change_no_token(backend: Any) -> None:
    engine = engine_beside(backend, Others([5, 200] * 40))
    transcript = Transcript()
    for key, length in enumerate((70, 1)):
        transcript.record(engine.step())
        engine.submit(submit_of(key, prompt_of(length), 6))
        transcript.run(engine)
    for key, length in enumerate((70, 1)):
        assert transcript.token_ids[key] == oracle_tokens(prompt_of(length), 6, VOCABULARY)
    assert {rows for rows, _ in backend.launches} >= {0, 1}
    assert_at_rest(engine)


def test_a_rank_proposes_what_it_has_to_compute(backend: Any) -> None:
    others = Others([])
    engine = engine_beside(backend, others)
    for key in range(2):
        engine.submit(submit_of(key, prompt_of(40, seed=key), 2))
    Transcript().run(engine)
    assert others.proposals[:2] == [
        StepShape(80, False, drawing=2, beginning=2),
        StepShape(2, True, drawing=2, decodes=True, rows=2),
    ]
    assert [shape for _, shape in backend.launches] == others.proposals[:2]


def test_a_rank_computes_dummies_until_all_agree_to_stop(backend: Any) -> None:
    others = Others([7, 7])
    engine = engine_beside(backend, others)
    engine.submit(submit_of(1, prompt_of(40), 50))
    engine.cancel(Cancel(1))
    engine.stop()
    while not engine.stopped:
        assert engine.has_work()
        engine.step()
    assert [rows for rows, _ in backend.launches] == [0, 0]
    assert others.proposals == [StepShape(0, True, stopping=True)] * 3


def test_a_stopping_rank_leaves_its_requests_while_others_compute(backend: Any) -> None:
    others = Others([0, 0, 7, 7, 7])
    engine = engine_beside(backend, others)
    engine.submit(submit_of(1, prompt_of(40), 50))
    engine.step()
    engine.stop()
    while not engine.stopped:
        engine.step()
    assert len(others.proposals) == 6
    assert others.proposals[-1] == StepShape(0, True, stopping=True)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("backend_type", [OracleBackend, DeferredOracle])
def test_preemption_between_dummy_steps_changes_no_token(backend_type: type[OracleBackend], seed: int) -> None:
    others = Others(random.Random(seed).choices([0, 1, 30], k=5000))
    config, backend = oracle_config(total_blocks=9), recording(backend_type, total_blocks=9)
    engine = Engine(config, backend, lambda: 0.0, agreement=others)
    prompts = [prompt_of(100, seed=key) for key in range(3)]
    for key, prompt in enumerate(prompts):
        engine.submit(submit_of(key, prompt, 150))
    transcript = Transcript().run(engine)
    for key, prompt in enumerate(prompts):
        assert transcript.token_ids[key] == oracle_tokens(prompt, 150, VOCABULARY)
    # The rank has a step without work of its own only if it launches steps ahead.
    assert (0 in {rows for rows, _ in backend.launches}) == backend.asynchronous
    assert_at_rest(engine)
