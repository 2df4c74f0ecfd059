import threading

import pytest

from engine.constraints.constraints import load_constraints
from engine.oracle.backend import OracleBackend
from engine.requests.intake import Intake, longest_context
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.constraints import Constraint
from mesh.errors import ContextExceeded, InvalidConstraint, InvalidRequest
from tests.support.engines import oracle_config, prompt_of, submit_of

CONFIG = oracle_config(total_blocks=4)
BACKEND = OracleBackend(CONFIG)
LONGEST = longest_context(BACKEND)
GRAMMAR = Constraint(grammar='start: "a"')


def test_no_request_may_be_longer_than_the_pool() -> None:
    assert LONGEST == 4 * BLOCK_TOKENS
    intake = Intake(CONFIG, BACKEND, None)
    intake.check(submit_of(1, prompt_of(LONGEST - 5), 5))
    with pytest.raises(ContextExceeded):
        intake.check(submit_of(1, prompt_of(LONGEST - 5), 6))


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="token ids must be from 0 to"):
        Intake(CONFIG, BACKEND, None).check(submit_of(1, [BACKEND.vocabulary_size], 5))


def test_without_constraints_a_request_that_has_one_is_refused() -> None:
    intake = Intake(CONFIG, BACKEND, None)
    with pytest.raises(InvalidConstraint, match="constrains no answers"):
        intake.check(submit_of(1, prompt_of(5), 5, constraint=GRAMMAR))
    assert (intake.ready, intake.compiling, list(intake.drain())) == (False, 0, [])


def test_a_request_is_kept_back_until_its_grammar_is_compiled() -> None:
    compiled = threading.Event()
    constraints = load_constraints(CONFIG, BACKEND.vocabulary_size, BACKEND.eos_token_ids, compiled.set)
    intake = Intake(CONFIG, BACKEND, constraints)
    free, constrained = submit_of(1, prompt_of(5), 5), submit_of(2, prompt_of(5), 5, constraint=GRAMMAR)
    assert intake.begin(intake.make(free, (0, 0)), free)
    request = intake.make(constrained, (0, 1))
    assert not intake.begin(request, constrained)
    assert intake.compiling == 1
    assert compiled.wait(30)
    # The oracle has no tokenizer that grammars could use.
    [(drained, error)] = intake.drain()
    assert drained is request and isinstance(error, InvalidConstraint)
    assert intake.compiling == 0
