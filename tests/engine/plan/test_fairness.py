"""Tenants that share an engine, counted in steps: nothing here depends on time."""

from typing import Any

import msgspec
import pytest

from engine.engine import Engine
from engine.oracle.tokens import oracle_tokens
from engine.plan.tenants import MAX_ABSENT, Tenants
from engine.protocol.messages import Submit
from mesh.domain.shares import Share
from tests.support.engines import VOCABULARY, Transcript, assert_at_rest, oracle_engine, prompt_of, submit_of

BUSY, QUIET = Share("busy"), Share("quiet")
PLACES = 8


def submitted(key: int, share: Share, prompt: int = 100, output: int = 50) -> Submit:
    submit = submit_of(key, prompt_of(prompt, key), output)
    return msgspec.structs.replace(submit, request=msgspec.structs.replace(submit.request, share=share))


def engine_of(**settings: Any) -> Engine:
    return oracle_engine(**{"max_requests": PLACES, "total_blocks": 64, "max_step_tokens": 256, **settings})


def busy_engine(requests: int, **settings: Any) -> tuple[Engine, Transcript]:
    """An engine after some steps, in which one tenant's requests have taken every place."""
    engine, transcript = engine_of(**settings), Transcript()
    for key in range(requests):
        engine.submit(submitted(key, BUSY))
    for _ in range(12):
        transcript.record(engine.step())
    return engine, transcript


def steps_to_first_token(engine: Engine, transcript: Transcript, submit: Submit) -> int:
    engine.submit(submit)
    for step in range(1, 500):
        transcript.record(engine.step())
        if transcript.token_ids.get(submit.key):
            return step
    raise AssertionError("no first token")


@pytest.mark.parametrize("ahead", [False, True])
def test_a_quiet_tenant_waits_a_step_despite_anothers_500_requests(ahead: bool) -> None:
    alone = steps_to_first_token(engine_of(ahead=ahead), Transcript(), submitted(1000, QUIET))
    engine, transcript = busy_engine(500, ahead=ahead)
    # With overlap, the step in flight is collected first.
    assert steps_to_first_token(engine, transcript, submitted(1000, QUIET)) <= alone + ahead


def test_whoever_gave_way_goes_on_where_it_was() -> None:
    engine, transcript = busy_engine(2 * PLACES)
    keys = dict.fromkeys(range(2 * PLACES), BUSY) | dict.fromkeys(range(1000, 1000 + PLACES), QUIET)
    for key in range(1000, 1000 + PLACES):
        engine.submit(submitted(key, QUIET))
    transcript.run(engine)
    assert transcript.token_ids == {key: oracle_tokens(prompt_of(100, key), 50, VOCABULARY) for key in keys}
    assert_at_rest(engine)


@pytest.mark.parametrize("steps", range(2, 12))
def test_no_request_gives_way_while_its_tokens_are_in_flight(steps: int) -> None:
    """All running requests grow by a block at once, so that blocks are no longer free for a request that comes then."""
    engine, transcript = engine_of(total_blocks=9, ahead=True), Transcript()
    for key in range(4):
        engine.submit(submitted(key, BUSY, prompt=58, output=20))
    for _ in range(steps):
        transcript.record(engine.step())
    engine.submit(submitted(1000, QUIET, prompt=58, output=20))
    transcript.run(engine)
    expected = {key: oracle_tokens(prompt_of(58, key), 20, VOCABULARY) for key in (*range(4), 1000)}
    assert transcript.token_ids == expected
    assert_at_rest(engine)


def test_a_tenant_that_is_alone_has_every_place() -> None:
    engine, _ = busy_engine(500)
    assert engine.load().running_requests == PLACES


def places_of_the_first(engine: Engine, first: Share, second: Share, steps: int) -> float:
    """The first tenant's share of all tokens, if both tenants always have requests."""
    transcript = Transcript()
    for key in range(200):
        engine.submit(submitted(key, first))
        engine.submit(submitted(1000 + key, second))
    for _ in range(steps):
        transcript.record(engine.step())
    tokens = {key: len(token_ids) for key, token_ids in transcript.token_ids.items()}
    return sum(count for key, count in tokens.items() if key < 1000) / sum(tokens.values())


@pytest.mark.parametrize(("weight", "part"), [(1.0, 0.5), (3.0, 0.75)])
def test_two_busy_tenants_get_tokens_by_their_weights(weight: float, part: float) -> None:
    found = places_of_the_first(engine_of(), Share("a", weight), Share("b"), 600)
    assert found == pytest.approx(part, abs=0.08)


def test_a_long_prompt_does_not_hold_up_another_tenants() -> None:
    engine, transcript = engine_of(total_blocks=256), Transcript()
    engine.submit(submitted(1, BUSY, prompt=8000))
    for _ in range(3):
        transcript.record(engine.step())
    assert steps_to_first_token(engine, transcript, submitted(2, QUIET)) == 1


def test_priority_orders_the_requests_of_one_tenant_and_no_others() -> None:
    engine, transcript = busy_engine(2 * PLACES)
    engine.submit(submitted(500, Share("busy", priority=-1), output=1))
    engine.submit(submitted(600, Share("quiet", priority=5), output=1))
    transcript.run(engine)
    order = list(transcript.token_ids)
    assert order.index(600) < order.index(500) < order.index(PLACES)


def test_service_counts_while_the_other_tenant_is_away() -> None:
    engine, transcript = busy_engine(100)
    waits = []
    for key in range(1000, 1005):
        waits.append(steps_to_first_token(engine, transcript, submitted(key, QUIET, prompt=250, output=1)))
        for _ in range(10):
            transcript.record(engine.step())
    assert waits == [waits[0]] * 5


def test_a_tenant_that_was_away_saved_nothing_up() -> None:
    engine = engine_of()
    transcript = Transcript()
    engine.submit(submitted(1, QUIET, output=1))
    transcript.run(engine)
    for key in range(10, 10 + 4 * PLACES):
        engine.submit(submitted(key, BUSY))
        engine.submit(submitted(1000 + key, Share("other")))
    for _ in range(200):
        transcript.record(engine.step())
    for key in range(2000, 2000 + 4 * PLACES):
        engine.submit(submitted(key, QUIET))
    for _ in range(20):
        transcript.record(engine.step())
    late = sum(len(tokens) for key, tokens in transcript.token_ids.items() if key >= 2000)
    # A third of the tokens of 20 steps, and the prompts' first tokens.
    assert 0 < late <= 20 * PLACES / 2


def test_nothing_is_kept_of_tenants_beyond_those_that_are_remembered() -> None:
    tenants = Tenants()
    for key in range(3 * MAX_ABSENT):
        tenants.enter(key, Share(f"tenant {key}"))
        tenants.admit(key)
        tenants.serve([(key, 1 + key)])
        if key:
            tenants.leave(key - 1)
    tenants.enter(-1, Share("another"))
    standing = tenants.standing
    assert len(standing.served) <= MAX_ABSENT + 2
    assert list(standing.held) == [f"tenant {3 * MAX_ABSENT - 1}"]
