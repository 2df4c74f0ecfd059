"""An engine whose requests decode while prompts are computed."""

import random
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest

from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.pace.mixed_steps import (
    EVEN,
    FEW_ANSWERS,
    FEWEST_CAPTURED,
    FIRST_TOKENS,
    MOST_STEPS,
)
from engine.pace.pacing import Pacing
from engine.parallel.config import ParallelConfig
from engine.plan.step_plan import PromptsAhead
from engine.protocol.messages import Cancel, LandingOpened
from engine.step.shape import StepShape
from tests.support.disaggregation import moving_engine
from tests.support.engines import Transcript, oracle_config, prompt_of, submit_of
from tests.support.fake_agent import Fabric, FakeAgent
from tests.support.remote_prompts import prefill_of
from tests.support.sleeping_clock import SleepingClock
from transfer.config import TransferConfig

# Time of an oracle's step that decodes, and the time that each token of a prompt adds.
STEP_MS, TOKEN_MS = 10.0, 0.1
# The same of a light model.
LIGHT_MS = 0.005


class Disturbed(NamedTuple):
    """The pace of a request that decodes while a prompt is computed, in milliseconds."""

    first_token_ms: float
    # The time of each step, from when the prompt came.
    gaps_ms: list[float]
    # Mean time of the request's tokens.
    token_ms: float


def decoding_during_a_prompt(tokens: int, **settings: Any) -> Disturbed:
    clock = SleepingClock()
    oracle = {"step_ms": STEP_MS, "prefill_tokens_per_second": 1000 / TOKEN_MS}
    config = oracle_config(total_blocks=400, oracle=oracle, **settings)
    engine = Engine(config, OracleBackend(config, clock, clock.sleep), clock)
    engine.submit(submit_of(0, prompt_of(10), 2000))
    transcript = Transcript()
    for _ in range(20):
        transcript.record(engine.step())
    engine.submit(submit_of(1, prompt_of(tokens, seed=1), 2))
    begun, before, times = clock.now, len(transcript.token_ids[0]), [clock.now]
    while 1 not in transcript.token_ids:
        transcript.record(engine.step())
        times.append(clock.now)
    first_token_ms = 1000 * (clock.now - begun)
    gaps_ms = [1000 * (later - earlier) for earlier, later in pairwise(times)]
    return Disturbed(first_token_ms, gaps_ms, first_token_ms / (len(transcript.token_ids[0]) - before))


def test_a_long_prompt_leaves_running_requests_their_pace() -> None:
    unlimited, limited = (decoding_during_a_prompt(4000, max_step_tokens=2048, mixed_step_ms=ms) for ms in (None, 30.0))
    # The first step with tokens of the prompt is taken before one has been measured.
    assert max(unlimited.gaps_ms[1:]) > 150
    assert max(limited.gaps_ms[1:]) == pytest.approx(30.0, rel=0.05)
    # Two thirds of each step are the prompt's.
    assert unlimited.first_token_ms == pytest.approx(410, rel=0.1)
    assert limited.first_token_ms == pytest.approx(600, rel=0.2)


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_long_prompt_leaves_running_requests_most_of_the_time(share: float, overlap: str) -> None:
    found = decoding_during_a_prompt(20_000, max_step_tokens=1024, prompt_share=share, overlap=overlap)
    # The last chunk's time has not been made up for yet.
    assert found.token_ms == pytest.approx(STEP_MS / (1 - share), rel=0.1)
    assert found.first_token_ms == pytest.approx(20_000 * TOKEN_MS / share, rel=0.1)


def test_a_prompt_whose_decoding_neighbours_have_ended_waits_no_longer() -> None:
    config = oracle_config(total_blocks=400, max_step_tokens=1024, prompt_share=0.01)
    engine = Engine(config, OracleBackend(config), lambda: 0.0)
    engine.submit(submit_of(0, prompt_of(10), 4))
    transcript = Transcript()
    transcript.record(engine.step())
    engine.submit(submit_of(1, prompt_of(20_000, seed=1), 2))
    for _ in range(40):
        transcript.record(engine.step())
    assert len(transcript.token_ids[1]) == 2


def pushing_beside_decoding() -> tuple[Engine, Fabric]:
    """An engine of ten blocks. Its request 0 decodes, and prompts may take a hundredth of the time. Request 1, whose KV
    is to be pushed, has eight of the blocks and has computed one chunk.
    """
    clock, fabric = SleepingClock(), Fabric(random.Random(0))
    config = oracle_config(
        total_blocks=10,
        max_step_tokens=64,
        prompt_share=0.01,
        transfer=TransferConfig(),
        oracle={"step_ms": STEP_MS, "prefill_tokens_per_second": 1000 / TOKEN_MS},
    )
    backend = OracleBackend(config, clock, clock.sleep)
    agent: Any = FakeAgent(backend.kv_memory(), backend.namespace, fabric)
    engine = Engine(config, backend, clock, agent)
    engine.submit(submit_of(0, prompt_of(10), 150))
    for _ in range(4):
        engine.step()
    decode, remote = moving_engine(fabric), submit_of(1, prompt_of(500, seed=1), 2, remote_prefill=True)
    decode.submit(remote)
    decode.step()
    (opened,) = decode.transfers.drain_news()
    assert isinstance(opened, LandingOpened)
    engine.submit(prefill_of(remote, opened))
    engine.step()
    return engine, fabric


def test_a_prompt_goes_on_if_it_holds_blocks_others_lack() -> None:
    engine, fabric = pushing_beside_decoding()
    transcript = Transcript()
    for _ in range(2000):
        fabric.run_one()
        engine.poll_transfers()
        if engine.has_work():
            transcript.record_rest(engine.step())
    assert transcript.ends.keys() == {0, 1}


def test_prompts_that_took_time_give_a_blocked_engine_no_work() -> None:
    engine, _ = pushing_beside_decoding()
    engine.cancel(Cancel(0))
    engine.submit(submit_of(2, prompt_of(200, seed=2), 2))
    for _ in range(20):
        engine.step()
    assert engine.load().waiting_requests == 1 and not engine.has_work()


def test_a_prompt_alone_takes_whole_steps() -> None:
    config = oracle_config(total_blocks=160, max_step_tokens=2048, mixed_step_ms=1.0)
    engine = Engine(config, OracleBackend(config), lambda: 0.0)
    engine.submit(submit_of(0, prompt_of(2000), 2))
    transcript = Transcript()
    transcript.record(engine.step())
    assert 0 in transcript.token_ids


@pytest.mark.parametrize(
    ("parallel", "even"),
    [
        pytest.param({}, True, id="one rank"),
        pytest.param({"dp": 2}, True, id="several ranks"),
        pytest.param({"tp": 2}, False, id="a TP group"),
    ],
)
def test_steps_are_even_where_prompts_allow_it(parallel: dict[str, Any], even: bool) -> None:
    config = oracle_config(mixed_step_ms="auto", parallel=ParallelConfig(**parallel))
    assert config.bounded_step_ms == ("auto" if even else None)
    assert config.model_copy(update={"prompt_share": 0.5}).bounded_step_ms is None


def even_engine(captured: int = FEWEST_CAPTURED, **settings: Any) -> tuple[Engine, SleepingClock]:
    """An engine whose prompts take LIGHT_MS a token, and whose other requests decode."""
    clock = SleepingClock()
    oracle = {"step_ms": STEP_MS, "prefill_tokens_per_second": 1000 / LIGHT_MS}
    config = oracle_config(total_blocks=400, max_step_tokens=8192, mixed_step_ms="auto", oracle=oracle, **settings)
    backend = OracleBackend(config, clock, clock.sleep)
    backend.captured_prompt_tokens = captured
    engine = Engine(config, backend, clock)
    for key in range(1 + FEW_ANSWERS):
        engine.submit(submit_of(key, prompt_of(10, seed=key), 20))
    for _ in range(10):
        engine.step()
    return engine, clock


@pytest.mark.parametrize(("captured", "even"), [(FEWEST_CAPTURED, True), (FEWEST_CAPTURED - 1, False), (0, False)])
def test_one_rank_has_even_steps_if_enough_is_captured(captured: int, even: bool) -> None:
    engine, clock = even_engine(captured)
    engine.submit(submit_of(9, prompt_of(8000, seed=9), 2))
    before = clock.now
    engine.step()
    step_ms = EVEN * STEP_MS if even else STEP_MS + 8000 * LIGHT_MS
    assert 1000 * (clock.now - before) == pytest.approx(step_ms, rel=0.01)


@pytest.mark.parametrize("decodes", [True, False])
def test_a_rank_without_answers_leaves_those_of_others_even(decodes: bool) -> None:
    config = oracle_config(mixed_step_ms="auto", parallel=ParallelConfig(dp=2))
    backend = OracleBackend(config)
    backend.captured_prompt_tokens = 1
    pacing = Pacing(config, backend)
    pacing.took([0.01], decoding=8)
    pacing.agreed(StepShape(8, decodes=decodes))
    ahead = PromptsAhead(4000, 1)
    bounds = pacing.limits(0, ahead).most_tokens, pacing.even_step_tokens(0, ahead)
    assert all((each is not None) == decodes for each in bounds)


@pytest.mark.parametrize(
    ("aim", "dividing", "counted"), [("balanced", 0, 1), ("balanced", 2, 2), ("balanced", 3, 3), ("throughput", 3, 1)]
)
def test_ranks_that_take_turns_count_one_anothers_prompts(aim: str, dividing: int, counted: int) -> None:
    config = oracle_config(mixed_step_ms="auto", aim=aim, parallel=ParallelConfig(dp=4))
    backend = OracleBackend(config)
    backend.captured_prompt_tokens = 1
    pacing = Pacing(config, backend)
    pacing.took([0.01], decoding=40)
    pacing.agreed(StepShape(8, decodes=True, dividing=dividing))
    assert pacing.limits(40, PromptsAhead(240_000, 5)).most_tokens == counted * 240_000 // MOST_STEPS


def test_a_rank_reports_how_many_prompt_tokens_it_takes() -> None:
    reported = even_engine()[0].load().even_step_tokens
    assert reported == pytest.approx((EVEN - 1) * STEP_MS / LIGHT_MS, rel=0.1)
    assert even_engine(0)[0].load().even_step_tokens is None


def test_a_prompt_takes_whole_steps_once_answers_have_ended() -> None:
    (engine, _), transcript = even_engine(), Transcript()
    while engine.has_work():
        transcript.record_rest(engine.step())
    engine.submit(submit_of(9, prompt_of(8000, seed=9), 1))
    engine.step()
    assert engine.load().queued_prefill_tokens == 0


def test_prompts_without_a_place_make_no_step_whole() -> None:
    engine, clock = even_engine(max_requests=2 + FEW_ANSWERS)
    for key in range(10, 20):
        engine.submit(submit_of(key, prompt_of(8000, seed=key), 2))
    before = clock.now
    engine.step()
    assert 1000 * (clock.now - before) == pytest.approx(EVEN * STEP_MS, rel=0.01)


class Decoding:
    """Another rank, which decodes in every step."""

    due = False

    def __init__(self, owes: bool = False) -> None:
        self.proposals: list[StepShape] = []
        self.owes = owes

    def agree(self, proposal: StepShape) -> StepShape:
        self.proposals.append(proposal)
        tokens, owes = max(proposal.tokens, 1), self.owes and proposal.decode_only
        return msgspec.structs.replace(proposal, tokens=tokens, decodes=True, owes=owes)


def test_a_prompt_leaves_requests_of_other_ranks_their_pace() -> None:
    parallel = ParallelConfig(dp=2, prompt_wait_steps=0, context_parallel_tokens=None)
    config = oracle_config(total_blocks=160, max_step_tokens=2048, mixed_step_ms=1000.0, parallel=parallel)
    other = Decoding()
    engine = Engine(config, OracleBackend(config), lambda: 0.0, agreement=other)
    engine.step()
    engine.submit(submit_of(0, prompt_of(2000), 2))
    engine.step()
    assert other.proposals[-1].tokens == FIRST_TOKENS


def test_a_prompt_waits_while_another_rank_owes() -> None:
    parallel = ParallelConfig(dp=2, prompt_wait_steps=0)
    config = oracle_config(total_blocks=160, max_step_tokens=2048, prompt_share=0.5, parallel=parallel)
    other = Decoding(owes=True)
    engine = Engine(config, OracleBackend(config), lambda: 0.0, agreement=other)
    engine.step()
    engine.submit(submit_of(0, prompt_of(2000), 2))
    for _ in range(3):
        engine.step()
    assert other.proposals[-1].tokens == 0 and engine.has_work()
    other.owes = False
    engine.step()
    engine.step()
    assert other.proposals[-1].tokens == 2000


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_prompt_leaves_the_reported_decode_time_as_it_is(overlap: str) -> None:
    clock = SleepingClock()
    oracle = {"step_ms": 20.0, "prefill_tokens_per_second": 2000.0}
    config = oracle_config(total_blocks=64, max_step_tokens=1024, oracle=oracle, overlap=overlap)
    engine = Engine(config, OracleBackend(config, clock, clock.sleep), clock)
    engine.submit(submit_of(0, prompt_of(10, 0), 200))
    for _ in range(60):
        engine.step()
    before = engine.load().decode_step_ms or 0.0
    assert before == pytest.approx(20, rel=0.02)
    engine.submit(submit_of(1, prompt_of(1000, 1), 1))
    began = clock.now
    reported = []
    for _ in range(20):
        engine.step()
        reported.append(engine.load().decode_step_ms or 0.0)
    # The prompt took half a second.
    assert clock.now - began > 0.85
    assert max(reported) < 1.06 * before
