from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client import Clock, Target
from loadgen.options import LoadOptions
from loadgen.plan import Plan, plan
from loadgen.records import RequestRecord
from loadgen.sending import Sending
from loadgen.sessions import session_jobs
from loadgen.workload import Answer, Job, Message
from mesh.config_values import load
from mesh.errors import ConfigError

VOCABULARY = 500
ANSWER = Answer("an answer", (3, 4, 5))


def options(**values: Any) -> LoadOptions:
    endpoint = {} if "url" in values else {"grpc": "127.0.0.1:1"}
    return LoadOptions.model_validate(
        endpoint | {"dataset": "sessions", "isl": 40, "osl": 7, "turn_tokens": 9} | values
    )


def sessions(count: int, seed: int = 0, **values: Any) -> list[Job]:
    return list(islice(session_jobs(options(**values), VOCABULARY, np.random.default_rng(seed)), count))


def all_turns(job: Job) -> list[Job]:
    turns = [job]
    while turns[-1].following is not None:
        turns.append(turns[-1].following(ANSWER).job)
    return turns


@given(st.integers(1, 5), st.integers(0, 3))
def test_each_turn_repeats_all_that_was_said(turns: int, seed: int) -> None:
    (job,) = sessions(1, seed, turns=turns)
    prompts = [each.prompt for each in all_turns(job)]
    assert [len(prompt) for prompt in prompts] == [40 + (3 + 9) * turn for turn in range(turns)]
    for before, after in pairwise(prompts):
        assert after[: len(before) + 3] == (*before, *ANSWER.token_ids)


@given(st.floats(0, 0.9))
def test_lengths_of_sessions_stay_in_their_range(ratio: float) -> None:
    for job in sessions(3, range_ratio=ratio):
        assert 40 * (1 - ratio) - 1 <= len(job.prompt) <= 40 * (1 + ratio)
        assert all(1 <= each.max_tokens <= 14 and each.exact for each in all_turns(job))


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, (4, 20)), ({"prefixes": 2}, (2, 20)), ({"prefix_length": 30}, (4, 30)), ({"prefixes": 0}, (20, 0))],
    ids=str,
)
def test_sessions_share_system_prompts(values: dict[str, int], expected: tuple[int, int]) -> None:
    different, length = expected
    prompts = [job.prompt for job in sessions(60, **values)]
    assert len({prompt[: length or 40] for prompt in prompts}) == (different if length else 60)
    assert len(set(prompts)) == 60


def test_sessions_over_http_are_chats() -> None:
    last = all_turns(sessions(1, turns=2, url="http://127.0.0.1:1/v1")[0])[-1]
    said = [message for message in last.prompt if isinstance(message, Message)]
    assert [message.role for message in said] == ["system", "user", "assistant", "user"]
    assert [len(message.content.split()) for message in said] == [20, 20, 2, 9]
    assert said[2].content == "an answer"


def test_a_session_draws_the_same_whatever_others_do() -> None:
    one, other = sessions(2), sessions(2)
    interleaved = [all_turns(job) for job in reversed(one)]
    assert [[turn.prompt for turn in turns] for turns in interleaved] == [
        [turn.prompt for turn in all_turns(job)] for job in (other[1], other[0])
    ]


@pytest.mark.parametrize("mean_s", [0.0, 4.0])
def test_pauses_have_the_mean_that_was_asked_for(mean_s: float) -> None:
    following = [job.following for job in sessions(2000, think_s=mean_s)]
    pauses = [each(ANSWER).pause_s for each in following if each is not None]
    assert np.mean(pauses) == pytest.approx(mean_s, rel=0.1)


def test_a_plan_counts_sessions() -> None:
    drawn = plan(options(requests=6, turns=3), Target("tiny", VOCABULARY))
    assert (len(drawn.jobs), len(drawn.times_s), drawn.turns) == (6, 6, 3)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (["turns=0"], "turns"),
        (["think_s=-1"], "think_s"),
        (["turn_tokens=0"], "turn_tokens"),
        (["prefix_length=512"], "shorter than the shortest prompt"),
        (["api=completions"], "sessions are chats"),
    ],
)
def test_sessions_that_cannot_be_are_refused(values: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(LoadOptions, None, ["grpc=a:1", "dataset=sessions", *values])


class Endpoint:
    """Answers at once, and fails requests of one turn. Keeps what it was asked."""

    def __init__(self, failing_tokens: int | None = None) -> None:
        self.jobs: list[Job] = []
        self._failing_tokens = failing_tokens

    async def discover(self) -> Target:
        return Target("tiny", VOCABULARY)

    async def send(self, job: Job, record: RequestRecord, clock: Clock) -> Answer:
        self.jobs.append(job)
        if len(job.prompt) == self._failing_tokens:
            record.fail("UNAVAILABLE", "gone")
            return Answer()
        record.tokens(clock(), 1)
        record.finished_s = clock()
        return ANSWER

    async def close(self) -> None:
        pass


async def sent(endpoint: Endpoint, **values: Any) -> tuple[list[RequestRecord], list[tuple[int, int, int]]]:
    shown: list[tuple[int, int, int]] = []
    planned: Plan = plan(options(rate=float("inf"), requests=3, **values), Target("tiny", VOCABULARY))
    sending = Sending(endpoint, planned, None, lambda *counts: shown.append(counts))
    await sending.run()
    return sending.records, shown


async def test_turns_are_due_after_answers_and_pauses() -> None:
    endpoint = Endpoint()
    records, shown = await sent(endpoint, turns=2, think_s=0.02)
    assert sorted(record.turn for record in records) == [1, 1, 1, 2, 2, 2]
    first_end = min(record.finished_s or 0 for record in records if record.turn == 1)
    assert all(record.scheduled_s > first_end for record in records if record.turn == 2)
    assert {len(job.prompt) for job in endpoint.jobs} == {40, 52}
    assert shown[-1] == (6, 6, 6)


async def test_a_failed_turn_ends_its_session() -> None:
    records, shown = await sent(Endpoint(failing_tokens=52), turns=4, think_s=0.0)
    assert sorted((record.turn, record.error) for record in records if record.turn > 1) == [(2, "UNAVAILABLE")] * 3
    assert shown[-1] == (6, 6, 6)
