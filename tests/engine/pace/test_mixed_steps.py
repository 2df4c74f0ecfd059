"""Steps that compute prompts while requests decode, and end in a set time."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.pace.mixed_steps import (
    EVEN,
    FEW_ANSWERS,
    FEWEST_CAPTURED,
    FEWEST_TOKENS,
    FIRST_TOKENS,
    MOST_STEPS,
    SEEN,
    UNBOUNDED,
    WORTHWHILE,
    MixedSteps,
)
from engine.pace.pacing import Pacing
from engine.parallel.config import ParallelConfig
from engine.plan.step_plan import PromptsAhead
from engine.protocol.messages import Cancel, LandingOpened
from engine.step.shape import StepShape
from mesh.domain.workers import PromptPace, WorkerSpeed
from mesh.tails import MOST_TOKENS
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


def converged(mixed: MixedSteps, seconds: Callable[[int], float], steps: int = 40) -> int:
    tokens = 0
    for _ in range(steps):
        found = mixed.most_prompt_tokens(0).all
        assert found is not None
        tokens = found
        mixed.launched(tokens > 0, True)
        mixed.observe(seconds(tokens), tokens)
    return tokens


@given(st.floats(1, 50), st.floats(1, 200), st.floats(0, 0.7), st.floats(0.01, 1))
def test_steps_come_to_take_what_they_may(without_ms: float, room_ms: float, fixed: float, token_ms: float) -> None:
    """fixed: the share of the room that any prompt takes."""
    mixed = MixedSteps(without_ms + room_ms)
    for _ in range(3):
        mixed.observe(without_ms / 1000, 0)
    tokens = converged(mixed, lambda tokens: (without_ms + fixed * room_ms + token_ms * tokens) / 1000)
    fits = room_ms * (1 - fixed) / token_ms
    assert tokens == pytest.approx(max(fits, FEWEST_TOKENS), rel=0.1, abs=2)


def test_chunks_become_smaller_as_tokens_take_longer() -> None:
    mixed = MixedSteps(40.0)
    mixed.observe(0.01, 0)
    assert converged(mixed, lambda tokens: (10 + 0.05 * tokens) / 1000) == pytest.approx(600, abs=1)
    assert converged(mixed, lambda tokens: (10 + 0.2 * tokens) / 1000) == pytest.approx(150, abs=1)


def test_a_first_step_takes_few_tokens_unless_unbounded() -> None:
    assert MixedSteps(30.0).most_prompt_tokens(0).all == FIRST_TOKENS
    unlimited = MixedSteps(None)
    unlimited.observe(1.0, 64)
    assert unlimited.most_prompt_tokens(0) == UNBOUNDED


def launched_by_the_host(tokens: int) -> float:
    """Seconds of a step whose chunks the host launches, which takes at least 170 ms."""
    return (170 + 0.3 * tokens) / 1000


def as_rows(tokens: int) -> float:
    return (20 + 0.25 * tokens) / 1000


@pytest.mark.parametrize(("step_ms", "rows"), [(30.0, 40), (45.0, 100), (60.0, 128), (23.0, 16)])
def test_few_tokens_are_rows_where_no_chunk_ends_in_time(step_ms: float, rows: int) -> None:
    mixed, taken = MixedSteps(step_ms), []
    mixed.observe(0.02, 0)
    for _ in range(2000):
        tokens = mixed.most_prompt_tokens(500).all
        assert tokens is not None
        taken.append(tokens)
        if tokens <= MOST_TOKENS:
            mixed.observe(as_rows(tokens), 0, row_tokens=tokens)
        else:
            mixed.launched(tokens > 0, True)
            mixed.observe(launched_by_the_host(tokens), tokens)
    # Chunks are tried again after some time.
    chunks = [tokens for tokens in taken if tokens > MOST_TOKENS]
    assert 1 < len(chunks) < len(taken) / 40
    assert sorted(taken)[len(taken) // 2] == pytest.approx(rows, abs=1)


def test_longer_steps_are_chunks() -> None:
    mixed, tokens = MixedSteps(400.0), 0
    mixed.observe(0.02, 0)
    for _ in range(100):
        tokens = mixed.most_prompt_tokens(500).all or 0
        assert tokens > MOST_TOKENS
        mixed.launched(tokens > 0, True)
        mixed.observe(launched_by_the_host(tokens), tokens)
    assert launched_by_the_host(tokens) == pytest.approx(0.4, rel=0.05)


@given(st.floats(0.05, 0.9), st.floats(1, 50), st.floats(0.2, 500), st.sampled_from([0, 1]))
def test_prompts_take_their_share_of_the_time(share: float, without_ms: float, prompt_ms: float, ahead: int) -> None:
    """ahead: steps that are launched before the one before them is observed."""
    mixed = MixedSteps(None, share)
    mixed.observe(without_ms / 1000, 0)
    taken, whole, flight = 0.0, 0.0, []
    for _ in range(4000):
        prompts = mixed.most_prompt_tokens(0).all != 0
        mixed.launched(prompts, True)
        flight.append(prompts)
        if len(flight) > ahead:
            prompts = flight.pop(0)
            taken += prompt_ms * prompts
            whole += without_ms + prompt_ms * prompts
            mixed.observe((without_ms + prompt_ms * prompts) / 1000, 1000 * prompts)
    # After each step with prompts others follow until the share is kept: at most one too many, and those that were
    # launched ahead.
    least = prompt_ms / (prompt_ms / share + (2 + ahead) * without_ms)
    # The last prompt's time may not have been made up for yet.
    assert least <= taken / whole and taken - prompt_ms <= share * whole * 1.001


def test_prompts_owe_nothing_while_no_request_decodes() -> None:
    mixed = MixedSteps(None, 0.5)
    for _ in range(3):
        mixed.launched(True, False)
        assert mixed.most_prompt_tokens(0) == UNBOUNDED
        mixed.observe(1.0, 1000, decodes=False)
    mixed.launched(True, True)
    assert mixed.most_prompt_tokens(0).all == 0


@given(st.floats(0.1, 0.8), st.floats(-60, 60), st.integers(0, 1000))
def test_prompts_of_ranks_whose_clocks_differ_begin_together(share: float, late_ms: float, seed: int) -> None:
    ranks, random_ms = (MixedSteps(None, share), MixedSteps(None, share)), random.Random(seed)
    for rank in ranks:
        rank.observe(0.03, 0)
    begun = 0
    for _ in range(500):
        prompts = {rank.most_prompt_tokens(0).all != 0 for rank in ranks}
        assert len(prompts) == 1
        tokens = 1000 * prompts.pop()
        begun += tokens > 0
        owes = any(rank.owes for rank in ranks) or tokens > 0
        for rank, off_ms in zip(ranks, (0, late_ms), strict=True):
            rank.launched(tokens > 0, True)
            rank.agreed(owes)
            ms = random_ms.gauss(30, 1) + bool(tokens) * (300 + off_ms)
            rank.observe(ms / 1000, tokens)
    assert begun >= 500 / (3 + 360 / 30 * (1 - share) / share)
    assert 300 * (begun - 1) <= share * (300 * begun + 30 * 500) * 1.02


@given(st.floats(5, 50), st.floats(0, 0.5), st.floats(0.02, 0.2), st.floats(5, 50))
def test_even_steps_follow_what_steps_without_prompts_take(
    quiet_ms: float, fixed: float, token_ms: float, later_ms: float
) -> None:
    """fixed: the share of a quiet step that any prompt adds."""
    mixed = MixedSteps("auto", speed=WorkerSpeed(quiet_ms, 8.0, PromptPace(1000 / token_ms)))
    for without_ms in (quiet_ms, later_ms):
        for _ in range(40):
            mixed.observe(without_ms / 1000, 0)
        added_ms = fixed * without_ms
        tokens = converged(mixed, lambda tokens: (without_ms + added_ms + token_ms * tokens) / 1000)  # noqa: B023
        step_ms = without_ms + added_ms + token_ms * tokens
        even_ms = max(EVEN * without_ms, without_ms + (1 + WORTHWHILE) * added_ms)
        assert step_ms == pytest.approx(even_ms, rel=0.15) or tokens == FEWEST_TOKENS


def test_even_steps_are_known_before_the_first() -> None:
    speed = WorkerSpeed(20.0, 8.0, PromptPace(10_000.0))
    assert MixedSteps("auto", speed=speed).most_prompt_tokens(0).all == pytest.approx((EVEN - 1) * 200, abs=1)
    assert MixedSteps("auto").most_prompt_tokens(0) == UNBOUNDED


def test_steps_grow_while_many_prompts_wait() -> None:
    mixed = MixedSteps("auto", speed=WorkerSpeed(20.0, 8.0, PromptPace(10_000.0)))
    few, many = (mixed.most_prompt_tokens(0, queued, decoding=9).all for queued in (1000, 100_000))
    assert few == pytest.approx((EVEN - 1) * 200, abs=1) and many == -(-100_000 // MOST_STEPS)


@pytest.mark.parametrize(
    ("prompts", "decoding", "even"),
    [
        pytest.param(1, 1, True, id="one of each"),
        pytest.param(2, FEW_ANSWERS, False, id="few answers"),
        pytest.param(2, FEW_ANSWERS + 1, True, id="many answers"),
        pytest.param(5, 4 * FEW_ANSWERS, False, id="many prompts"),
        pytest.param(1, 0, False, id="no answer here"),
    ],
)
def test_few_answers_wait_for_many_prompts(prompts: int, decoding: int, even: bool) -> None:
    mixed = MixedSteps("auto", speed=WorkerSpeed(20.0, 8.0, PromptPace(10_000.0)))
    assert (mixed.most_prompt_tokens(0, 1000, prompts, decoding) != UNBOUNDED) == even


def test_chunks_are_worth_what_any_chunk_adds() -> None:
    """A chunk reads weights that the few requests which decode do not."""
    mixed = MixedSteps("auto", speed=WorkerSpeed(6.0, 8.0, PromptPace(40_000.0)))
    tokens = converged(mixed, lambda tokens: (6 + 13 + 0.025 * tokens) / 1000)
    assert tokens == pytest.approx(WORTHWHILE * 13 / 0.025, rel=0.02)


@pytest.mark.parametrize("slow_ms", [40.0, 300.0])
@pytest.mark.parametrize("slow", [0, 1, 7])
def test_one_slow_step_changes_no_chunk(slow: int, slow_ms: float) -> None:
    """slow: number of the step that the host holds up, of those with prompts."""
    mixed = MixedSteps("auto", speed=WorkerSpeed(10.0, 8.0, PromptPace(100_000.0)))
    found = set()
    for step in range(20):
        tokens = mixed.most_prompt_tokens(0).all or 0
        found.add(tokens)
        mixed.launched(True, True)
        mixed.observe((10 + 0.01 * tokens + slow_ms * (step == slow)) / 1000, tokens)
        mixed.observe(0.01, 0)
    assert min(found) >= max(found) - 1


@pytest.mark.parametrize("later_ms", [5.0, 10.0, 25.0])
def test_steps_with_prompts_show_what_answers_take_alone(later_ms: float) -> None:
    """More answers run after a while, or fewer, and every step has prompts."""
    added_ms, token_ms = 3.0, 0.01
    mixed = MixedSteps("auto", speed=WorkerSpeed(10.0, 8.0, PromptPace(1000 / token_ms)))
    converged(mixed, lambda tokens: (10 + added_ms + token_ms * tokens) / 1000, SEEN)
    tokens = converged(mixed, lambda tokens: (later_ms + added_ms + token_ms * tokens) / 1000)
    room_ms = (EVEN - 1) * later_ms
    assert tokens == pytest.approx(max(room_ms - added_ms, WORTHWHILE * added_ms) / token_ms, rel=0.02)


def test_chunks_are_larger_where_answers_read_the_same_weights() -> None:
    mixed = MixedSteps("auto", speed=WorkerSpeed(10.0, 8.0, PromptPace(100_000.0)))
    for _ in range(40):
        mixed.observe(0.01, 0)
    tokens = converged(mixed, lambda tokens: (10 - 5 + 0.01 * tokens) / 1000)
    assert tokens == pytest.approx((EVEN * 10 - 5) / 0.01, rel=0.02)


def divided_or_alone(tokens: int) -> float:
    """Seconds of a step of four ranks, which compute a chunk of 512 tokens and more together."""
    return (20 + 5 + 0.1 * tokens / (4 if tokens >= 512 else 1)) / 1000


def test_chunks_that_ranks_divide_are_measured_apart() -> None:
    mixed = MixedSteps(44.0, divided_tokens=512)
    mixed.observe(0.02, 0)
    for _ in range(60):
        most = mixed.most_prompt_tokens(0)
        assert most.all is not None and most.alone is not None
        for tokens in (most.all, 0, most.alone):
            mixed.launched(tokens > 0, True)
            mixed.observe(divided_or_alone(tokens) if tokens else 0.02, tokens)
    assert most.all == pytest.approx((44 - 20 - 5) / 0.025, rel=0.05)
    assert most.alone == pytest.approx((44 - 20 - 5) / 0.1, rel=0.05)


def test_even_chunks_that_ranks_divide_are_known_before_the_first() -> None:
    speed = WorkerSpeed(20.0, 8.0, PromptPace(10_000.0))
    most = MixedSteps("auto", divided_tokens=512, speed=speed, ranks=4).most_prompt_tokens(0)
    assert most.all == pytest.approx((EVEN - 1) * 20 / 0.025, abs=1)
    assert most.alone == pytest.approx((EVEN - 1) * 20 / 0.1, abs=1)


def test_chunks_that_ranks_divide_are_never_smaller() -> None:
    mixed = MixedSteps(2.0, divided_tokens=512)
    mixed.launched(chunks=True, decodes=True)
    mixed.observe(1.0, 512)
    assert mixed.most_prompt_tokens(0).all == 512


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
