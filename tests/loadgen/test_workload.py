from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.arrivals import arrival_times, arrival_times_within
from loadgen.client import Target
from loadgen.options import LoadOptions
from loadgen.plan import plan
from loadgen.workload import Job, Message, as_messages, dataset_jobs, dataset_rows, read_lines, synthetic_jobs
from mesh.config_values import load
from mesh.errors import ConfigError


def options(**values: object) -> LoadOptions:
    return LoadOptions.model_validate({"grpc": "127.0.0.1:1", "rate": 1.0} | values)


def read_dataset(path: Path, default_max_tokens: int) -> list[Job]:
    return dataset_rows(path, read_lines(path), default_max_tokens)


def jobs(count: int, seed: int = 0, **values: object) -> list[Job]:
    return list(islice(synthetic_jobs(options(**values), 1000, np.random.default_rng(seed)), count))


def test_equal_seeds_give_equal_requests() -> None:
    assert jobs(5, isl=40, range_ratio=0.5) == jobs(5, isl=40, range_ratio=0.5)


def test_different_seeds_give_different_requests() -> None:
    assert jobs(2, seed=1)[0].prompt != jobs(2, seed=2)[0].prompt


@given(st.integers(1, 300), st.floats(0, 0.99), st.integers(0, 100))
def test_lengths_stay_within_the_range_ratio(isl: int, ratio: float, seed: int) -> None:
    for job in jobs(5, seed, isl=isl, osl=20, range_ratio=ratio):
        assert max(1, isl * (1 - ratio) - 1) <= len(job.prompt) <= isl * (1 + ratio)
        assert 1 <= job.max_tokens <= 40


def test_shared_prefixes_are_few_and_the_rest_differs() -> None:
    many = jobs(40, isl=64, prefixes=3, prefix_length=48)
    assert len({job.prompt[:48] for job in many}) == 3
    assert len({job.prompt for job in many}) == 40
    assert {len(job.prompt) for job in many} == {64}


def test_arrivals_are_ordered_and_follow_the_seed() -> None:
    first, second = (arrival_times(5.0, np.random.default_rng(7), count=50) for _ in range(2))
    assert first == second == sorted(first)


def test_gaps_between_arrivals_are_exponential() -> None:
    gaps = np.diff(arrival_times(4.0, np.random.default_rng(0), count=20_000))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert arrival_times(float("inf"), np.random.default_rng(0), count=3) == [0.0, 0.0, 0.0]


def test_a_duration_bounds_the_arrivals() -> None:
    times = arrival_times_within(50.0, np.random.default_rng(0), duration_s=4.0)
    assert times[-1] < 4.0
    assert len(times) == pytest.approx(200, rel=0.25)


def test_a_dataset_of_json_lines_keeps_messages_prompts_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7}\n\n{"prompt": "once"}\n')
    assert read_dataset(path, 32) == [Job((Message("user", "hi"),), 7), Job("once", 32)]


def test_a_text_dataset_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo words\n")
    assert read_dataset(path, 5) == [Job("one", 5), Job("two words", 5)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\n{"text": "b"}', "row 2"),
        ('{"prompt": 3}', "row 1"),
        ("{broken", "row 1"),
        ('{"prompt": "a", "max_tokens": -3}', "row 1: .*>= 1"),
        ('{"prompt": "a", "max_tokens": 99999999999}', "row 1: .*<= "),
    ],
)
def test_a_bad_dataset_is_refused_with_its_row(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_dataset(path, 5)


def test_a_dataset_from_another_system_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', encoding="utf-8-sig")
    assert [job.prompt for job in read_dataset(path, 5)] == ["a\u2028b", "c"]


def test_a_missing_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_dataset(tmp_path / "absent", 5)


def test_a_dataset_starts_over_when_it_runs_out() -> None:
    rows = [Job("a", 1), Job("b", 1)]
    assert [job.prompt for job in islice(dataset_jobs(rows), 5)] == ["a", "b", "a", "b", "a"]


def test_the_tasks_dataset_is_endless_and_follows_the_seed() -> None:
    def drawn(seed: int) -> list[Job]:
        drawing = options(dataset="tasks", requests=12, seed=seed)
        return list(plan(drawing, Target("tiny", None)).jobs)

    assert len(drawn(0)) == 12
    assert drawn(0) == drawn(0) != drawn(1)
    assert all(isinstance(message, Message) for job in drawn(0) for message in job.prompt)
    assert len({job.max_tokens for job in drawn(0)}) > 3


def test_token_ids_become_words_for_chats() -> None:
    message = as_messages(Job(tuple(range(20, 50)), 4)).prompt[0]
    assert isinstance(message, Message)
    assert len(message.content.split()) == 30


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (["rate=1"], "name one endpoint"),
        (["rate=1", "grpc=a:1", "url=http://a/v1"], "name one endpoint"),
        (["rate=1", "grpc=a:1", "requests=5", "duration_s=3"], "not both"),
        (["rate=.inf", "grpc=a:1", "duration_s=3"], "finite rate"),
        (["rate=0", "grpc=a:1"], "rate"),
        (["rate=1", "grpc=a:1", "seed=-1"], "seed"),
        (["rate=1", "grpc=a:1", "osl=99999999999"], "osl"),
        (["rate=1", "grpc=a:1", "isl=100000000"], "isl"),
        (["rate=1", "grpc=a:1", "requests=99999999999999"], "requests"),
        (["rate=1e9", "grpc=a:1", "duration_s=1e9"], "more than 10,000,000 requests"),
        (["rate=1", "grpc=a:1", "prefixes=2"], "both prefixes and prefix_length"),
        (["rate=1", "grpc=a:1", "isl=10", "prefixes=2", "prefix_length=10"], "shorter than"),
    ],
)
def test_options_that_disagree_are_refused(values: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(LoadOptions, None, values)
