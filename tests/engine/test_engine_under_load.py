"""The engine over the oracle backend under random traffic: tokens right, requests ended, blocks back."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.engine import Engine
from engine.oracle.tokens import oracle_tokens
from engine.pace.step_times import StepTimes
from engine.protocol.messages import Cancel, Submit
from mesh.domain.sampling import Sampling
from tests.support.engines import VOCABULARY, Others, Transcript, assert_at_rest, oracle_engine, prompt_of, submit_of

# An engine that does not finish in this many steps is stuck.
MOST_STEPS = 200_000


@dataclass(frozen=True)
class Traffic:
    requests: int
    longest_prompt: int
    most_tokens: int
    # Before each step: the probability that requests arrive, and that one of those that arrived is cancelled.
    arrival_probability: float = 0.5
    cancel_probability: float = 0.0
    # How many tokens of the vocabulary end a request.
    stop_tokens: int = 0


def submits_of(traffic: Traffic, rng: random.Random) -> list[Submit]:
    """Prompts share prefixes of four documents; half are sampled."""
    documents = [prompt_of(traffic.longest_prompt, seed) for seed in range(4)]
    submits = []
    for key in range(traffic.requests):
        length = rng.randint(1, traffic.longest_prompt)
        prompt = rng.choice(documents)[: rng.randint(0, length)]
        prompt += rng.choices(range(VOCABULARY), k=length - len(prompt))
        sampling = Sampling(temperature=rng.choice([0.0, 0.8]), seed=rng.getrandbits(64))
        stop_token_ids = rng.sample(range(VOCABULARY), traffic.stop_tokens)
        most_tokens = rng.randint(1, traffic.most_tokens)
        submits.append(submit_of(key, prompt, most_tokens, sampling=sampling, stop_token_ids=stop_token_ids))
    return submits


def drive(engine: Engine, submits: list[Submit], traffic: Traffic, rng: random.Random) -> tuple[Transcript, set[int]]:
    """Submit at random times and cancel some, until all is done. Also returns the requests cancelled before their
    end.
    """
    transcript, cancelled = Transcript(), set()
    arriving = iter(submits)
    arrived: list[int] = []
    left = len(submits)
    for _ in range(MOST_STEPS):
        if left and rng.random() < traffic.arrival_probability:
            for _ in range(min(left, rng.choice([1, 1, 2, 8]))):
                engine.submit(submit := next(arriving))
                arrived.append(submit.key)
                left -= 1
        if arrived and rng.random() < traffic.cancel_probability:
            key = rng.choice(arrived)
            if key not in transcript.ends:
                cancelled.add(key)
            engine.cancel(Cancel(key))
        if engine.has_work():
            transcript.record(engine.step())
        elif not left:
            return transcript, cancelled
    raise AssertionError("the engine is stuck")


def check(transcript: Transcript, submits: list[Submit], cancelled: set[int]) -> None:
    for submit in submits:
        expected = oracle_tokens(
            submit.request.token_ids, submit.request.stop.max_tokens, VOCABULARY, submit.request.sampling
        )
        stops = [index for index, token_id in enumerate(expected) if token_id in submit.request.stop.token_ids]
        expected = expected[: stops[0] + 1] if stops else expected
        got = transcript.token_ids[submit.key]
        if submit.key in cancelled:
            assert transcript.ends[submit.key].finish == "cancelled"
            assert got == expected[: len(got)]
        else:
            assert transcript.ends[submit.key].finish == ("stop" if stops else "length")
            assert got == expected


def check_run(traffic: Traffic, seed: int, **engine_settings: Any) -> Transcript:
    rng = random.Random(seed)
    engine = oracle_engine(**engine_settings)
    submits = submits_of(traffic, rng)
    transcript, cancelled = drive(engine, submits, traffic, rng)
    check(transcript, submits, cancelled)
    assert_at_rest(engine)
    return transcript


@pytest.mark.parametrize(("prefix_cache", "ahead"), [(True, True), (False, False)])
def test_hundreds_of_requests_get_their_tokens(prefix_cache: bool, ahead: bool) -> None:
    traffic = Traffic(400, longest_prompt=300, most_tokens=60, stop_tokens=2)
    check_run(traffic, seed=1, total_blocks=400, max_requests=64, prefix_cache=prefix_cache, ahead=ahead)


@pytest.mark.parametrize(("next_n", "ahead"), [(1, False), (3, True)])
def test_drafts_change_no_token_of_hundreds_of_requests(next_n: int, ahead: bool) -> None:
    traffic = Traffic(400, longest_prompt=300, most_tokens=60, cancel_probability=0.1, stop_tokens=20)
    check_run(traffic, seed=6, total_blocks=150, max_requests=64, drafts={"next_n": next_n}, ahead=ahead)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_changing_depth_of_drafts_changes_no_token(ahead: bool) -> None:
    rng = random.Random(7)
    # For each number of rows another depth is the best.
    depths = [rng.randrange(6) for _ in range(64)]
    seconds = [[1.0 if depth == best else 100.0 for depth in range(6)] for best in depths]
    traffic = Traffic(400, longest_prompt=300, most_tokens=60, cancel_probability=0.1, stop_tokens=20)
    times, drafts = StepTimes(range(1, 65), seconds), {"next_n": "auto"}
    check_run(traffic, seed=8, total_blocks=150, max_requests=64, drafts=drafts, ahead=ahead, step_times=times)


def test_cancelled_requests_disturb_no_other() -> None:
    traffic = Traffic(400, longest_prompt=300, most_tokens=60, cancel_probability=0.3)
    check_run(traffic, seed=2, total_blocks=200, max_requests=32)


def test_a_tiny_pool_still_completes_everything() -> None:
    traffic = Traffic(100, longest_prompt=200, most_tokens=200, cancel_probability=0.02)
    check_run(traffic, seed=3, total_blocks=12, max_requests=16, max_step_tokens=128)


def test_reported_blocks_add_up_to_what_is_cached() -> None:
    traffic = Traffic(300, longest_prompt=300, most_tokens=100)
    transcript = check_run(traffic, seed=4, total_blocks=40, max_requests=16)
    cached: set[bytes] = set()
    for step in transcript.steps:
        assert not cached & set(step.stored_blocks)
        assert cached >= set(step.removed_blocks)
        cached = (cached | set(step.stored_blocks)) - set(step.removed_blocks)
    assert 0 < len(cached) <= 40


def test_shared_prefixes_are_found() -> None:
    traffic = Traffic(300, longest_prompt=640, most_tokens=10)
    transcript = check_run(traffic, seed=5, total_blocks=2000, max_requests=32)
    assert sum(transcript.cached_tokens.values()) > 300 * 64


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    total_blocks=st.integers(5, 30),
    max_requests=st.integers(1, 20),
    max_step_tokens=st.integers(64, 400),
    cancel_probability=st.sampled_from([0.0, 0.2]),
    stop_tokens=st.sampled_from([0, 5, 50]),
    ahead=st.booleans(),
    # Most tokens that another rank computes in a step; 0 if there is no other.
    other_tokens=st.sampled_from([0, 1, 100]),
    next_n=st.integers(0, 5),
    draft_accuracy=st.sampled_from([0.0, 0.7, 1.0]),
)
def test_any_small_engine_serves_any_traffic(
    seed: int,
    total_blocks: int,
    max_requests: int,
    max_step_tokens: int,
    cancel_probability: float,
    stop_tokens: int,
    ahead: bool,
    other_tokens: int,
    next_n: int,
    draft_accuracy: float,
) -> None:
    others = Others(random.Random(seed).choices([0, other_tokens], k=10_000))
    traffic = Traffic(
        20, longest_prompt=160, most_tokens=80, cancel_probability=cancel_probability, stop_tokens=stop_tokens
    )
    check_run(
        traffic,
        seed,
        total_blocks=total_blocks,
        max_requests=max_requests,
        max_step_tokens=max(max_step_tokens, max_requests * (1 + next_n)),
        ahead=ahead,
        others=others,
        drafts={"next_n": next_n},
        oracle={"draft_accuracy": draft_accuracy},
    )
