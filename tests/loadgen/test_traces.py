import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.client import Target
from loadgen.options import LoadOptions
from loadgen.plan import Plan, plan
from loadgen.trace_jobs import TraceJobs
from loadgen.traces import BLOCK_TOKENS, TraceRow, in_order, is_trace, mooncake_rows
from mesh.errors import ConfigError

PATH = Path("trace.jsonl")
VOCABULARY = 500
Blocks = st.lists(st.integers(-5, 5), max_size=5)


def row(*hash_ids: int, timestamp: float = 0.0, rest: int = 6) -> TraceRow:
    return TraceRow(timestamp, BLOCK_TOKENS * len(hash_ids) + rest, 3, hash_ids)


def line(**changes: Any) -> str:
    return json.dumps({"timestamp": 500, "input_length": 1030, "output_length": 5, "hash_ids": [1, 2, 3]} | changes)


def prompts(*rows: TraceRow, seed: int = 0) -> list[tuple[int, ...]]:
    found = [job.prompt for job in TraceJobs(rows, seed, VOCABULARY, as_text=False)]
    return [tuple(token_id for token_id in prompt if isinstance(token_id, int)) for prompt in found]


def played(directory: Path, *lines: str, url: str | None = None, **values: Any) -> Plan:
    path = directory / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    endpoint = {"url": url} if url else {"grpc": "127.0.0.1:1"}
    return plan(LoadOptions.model_validate(endpoint | {"dataset": path} | values), Target("tiny", VOCABULARY))


@given(Blocks, Blocks, st.integers(1, BLOCK_TOKENS - 1), st.integers(0, 3))
def test_prompts_share_what_their_hash_ids_share(one: list[int], other: list[int], rest: int, seed: int) -> None:
    first, second = prompts(row(*one, rest=rest), row(*other, rest=rest), seed=seed)
    assert [len(first) - rest, len(second) - rest] == [len(one) * BLOCK_TOKENS, len(other) * BLOCK_TOKENS]
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        block = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
        assert (first[block] == second[block]) == (left == right)


def test_the_last_hash_id_covers_an_incomplete_block() -> None:
    first, second = prompts(TraceRow(0, 700, 3, (1, 2)), TraceRow(0, 1024, 3, (1, 2)))
    assert (len(first), first) == (700, second[:700])


def test_what_no_hash_id_covers_is_the_requests_own() -> None:
    first, second = prompts(row(1, rest=40), row(1, rest=40))
    assert first[:BLOCK_TOKENS] == second[:BLOCK_TOKENS]
    assert first[BLOCK_TOKENS:] != second[BLOCK_TOKENS:]


def test_seeds_decide_over_a_traces_prompts() -> None:
    assert prompts(row(1), seed=3) == prompts(row(1), seed=3) != prompts(row(1), seed=4)


def test_requests_are_sent_at_the_traces_times(tmp_path: Path) -> None:
    lines = (line(timestamp=2500), "", line(timestamp=500), line(timestamp=1500, output_length=7))
    replayed = played(tmp_path, *lines, rate=2.0)
    assert replayed.times_s == [0.0, 0.5, 1.0]
    assert [(job.max_tokens, job.exact, len(job.prompt)) for job in replayed.jobs] == [
        (5, True, 1030),
        (7, True, 1030),
        (5, True, 1030),
    ]


@pytest.mark.parametrize("limit", [{"requests": 2}, {"duration_s": 1.5}], ids=str)
def test_a_trace_can_be_played_in_part(tmp_path: Path, limit: dict[str, Any]) -> None:
    replayed = played(tmp_path, *(line(timestamp=1000 * second) for second in range(4)), **limit)
    assert replayed.times_s == [0.0, 1.0]
    assert len(list(replayed.jobs)) == 2


def test_over_http_a_trace_is_text(tmp_path: Path) -> None:
    first, second = played(tmp_path, line(), line(hash_ids=[1, 2, 4]), url="http://127.0.0.1:1/v1").jobs
    assert isinstance(first.prompt, str) and isinstance(second.prompt, str)
    one, other = first.prompt.split(), second.prompt.split()
    assert (len(one), one[:1024], len(other)) == (1030, other[:1024], 1030)
    assert one[1024:] != other[1024:]


def test_a_datasets_rows_are_no_trace() -> None:
    assert is_trace(["", line()])
    assert not any(is_trace([text]) for text in ('{"prompt": "a", "timestamp": 1}', "{broken", "hello", "[1]"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"timestamp": -1}, "line 3: the timestamp is -1, and times count from 0"),
        ({"input_length": 0}, "line 3: lengths must be at least 1"),
        ({"output_length": 10**9}, "line 3: lengths must be at most 10,000,000"),
        (
            {"input_length": 2048},
            "line 3: 3 hash_ids are too few for input_length 2048, which has 4 whole",
        ),
        ({"hash_ids": ["a"]}, "line 3: Expected `int`, got `str`"),
        ({"prompt": "a"}, "line 3: Object contains unknown field `prompt`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_traces_broken_line_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"trace.jsonl, {complaint}"):
        mooncake_rows(PATH, [line(), "", line(**changes)])


def test_a_line_that_breaks_off_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trace.jsonl, line 2: Input data was truncated"):
        mooncake_rows(PATH, [line(), line()[:30]])


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no request"):
        in_order(PATH, [])
