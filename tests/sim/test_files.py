from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from loadgen.summary import Objectives
from mesh.errors import ConfigError
from sim.asked import length
from sim.run import read_fleet, read_objectives, read_workload, simulate
from sim.sweep import Files, combinations, highest_rate, overrides
from sim.tasks import TaskWorkload
from sim.traces import TraceWorkload, read_trace
from sim.workload import LengthConfig
from tests.support.simulation import make_fleet, make_workload


def test_objectives_are_times_with_units() -> None:
    assert read_objectives("ttft=2s,tpot=50ms") == Objectives(2000.0, 50.0)
    assert read_objectives("tpot=0.05s") == Objectives(None, 50.0)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=2", "ttft=-1s", "itl=5ms", "tpot=fastms"])
def test_other_objectives_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="expected times such as ttft=2s,tpot=50ms"):
        read_objectives(text)


def test_an_unknown_key_of_a_fleet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("decode: {replica: 3}\n")
    with pytest.raises(ConfigError, match=r"unknown key decode\.replica \(did you mean decode\.replicas"):
        read_fleet(path)


def test_a_fleet_that_computes_no_prompts_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("decode: {replicas: 1, can_prefill: false}\n")
    with pytest.raises(ConfigError, match="no worker computes prompts"):
        read_fleet(path)


def test_a_fleet_that_cannot_hold_a_request_says_so() -> None:
    fleet = make_fleet(decode={"replicas": 1, "total_blocks": 10})
    with pytest.raises(ConfigError, match=r"requests of 1020 tokens and a decode worker has room for 640"):
        simulate(fleet, make_workload(prompt={"mean": 1000}), Objectives(None, None))


def test_a_cost_file_lies_beside_the_fleet(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("costs: card.json\n")
    assert read_fleet(path).costs == tmp_path / "card.json"


def test_a_workload_is_a_trace_or_drawn(tmp_path: Path) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text("seconds: 5\n")
    with pytest.raises(ConfigError, match="give one of arrivals and trace"):
        read_workload(path)


MOONCAKE = (
    '{"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 28482, "input_length": 1030, "output_length": 5, "hash_ids": [46, 48]}\n'
)
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.6805900,4,2\n"


def test_equal_hash_ids_of_a_trace_are_equal_texts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second = TraceWorkload(make_workload(arrivals=None, trace=path))
    assert [first.seconds, second.seconds] == [0.0, 1.0]
    assert [len(first.token_ids), first.output_tokens, second.output_tokens] == [1030, 52, 5]
    assert first.token_ids[:512] == second.token_ids[:512]
    assert first.token_ids[512:1024] != second.token_ids[512:1024]


def test_azures_traces_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    rows = read_trace(path)
    assert [(row.timestamp, row.input_length, row.output_length) for row in rows] == [(0.0, 374, 44), (1000.0, 4, 2)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MOONCAKE + "{broken\n", "line 3"),
        (MOONCAKE.replace("52", "0"), "line 1: lengths must be at least 1"),
        (MOONCAKE.replace("hash_ids", "hashes", 1), "line 1: Object contains unknown field `hashes`"),
        (AZURE.replace("374", "many"), "line 2"),
        (AZURE.replace("GeneratedTokens", "Generated"), "line 2: expected TIMESTAMP"),
        ("", "is empty"),
    ],
)
def test_a_trace_with_a_broken_line_names_it(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_trace(path)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parents[2] / "configs" / "workloads").iterdir()), ids=lambda path: path.stem
)
def test_the_workloads_that_come_along_can_be_run(path: Path) -> None:
    overrides = ["seconds=2", "warm_up_seconds=0", "arrivals.per_second=2"]
    workload = read_workload(path, overrides)
    result = simulate(make_fleet(decode={"replicas": 2}), workload, Objectives(None, None))
    assert result.summary.completed == result.summary.requests


def test_warm_up_and_cool_down_are_not_counted() -> None:
    steady = {"kind": "steady", "per_second": 4}
    workload = make_workload(seconds=4, warm_up_seconds=1, cool_down_seconds=1.5, arrivals=steady)
    result = simulate(make_fleet(), workload, Objectives(None, None))
    # One each quarter of a second from the first to 3.75 s, of which those from 1 to before 2.5 s count.
    assert (result.roles["decode"].prompts, result.summary.requests) == (15, 6)


@pytest.mark.parametrize("kind", ["{kind: quantiles, mean: 5}", "{quantiles: [1, 2], mean: 5}"])
def test_quantiles_and_their_kind_go_together(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "workload.yaml"
    path.write_text(f"arrivals: {{per_second: 1}}\nprompt: {kind}\n")
    with pytest.raises(ConfigError, match="go together"):
        read_workload(path)


def test_equal_shares_of_lengths_lie_between_quantiles() -> None:
    config = LengthConfig(kind="quantiles", mean=50, quantiles=(10, 20, 100))
    generator = np.random.default_rng(1)
    drawn = np.array([length(config, generator) for _ in range(4000)])
    assert drawn.min() >= 10 and drawn.max() <= 100
    assert np.mean(drawn <= 20) == pytest.approx(0.5, abs=0.03)


def test_chats_of_tasks_share_their_beginnings() -> None:
    prompts = [asked.token_ids for asked in TaskWorkload(make_workload(20.0, tasks=True))]
    beginnings = Counter(tuple(prompt[:16]) for prompt in prompts if len(prompt) > 16)
    assert max(beginnings.values()) > len(prompts) / 20
    assert prompts == [asked.token_ids for asked in TaskWorkload(make_workload(20.0, tasks=True))]


def test_a_sweep_is_every_combination() -> None:
    found = list(combinations(["pd=1:3,2:2", "rate=4,8"]))
    assert found[0] == ("prefill=1", "decode=3", "rate=4")
    assert len(found) == 4
    assert overrides(found[0]) == (["prefill.replicas=1", "decode.replicas=3"], ["arrivals.per_second=4"])


@pytest.mark.parametrize("sweep", ["rate", "rate=", "=4", "pd=4"])
def test_a_sweep_without_values_is_refused(sweep: str) -> None:
    with pytest.raises(ConfigError):
        list(combinations([sweep]))


def test_a_setting_of_neither_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected fleet\.KEY=VALUE"):
        overrides(["replicas=3"])


def test_the_highest_rate_is_where_the_objectives_are_just_kept(tmp_path: Path) -> None:
    fleet, workload = tmp_path / "fleet.yaml", tmp_path / "workload.yaml"
    fleet.write_text("decode: {replicas: 1, max_requests: 8}\n")
    workload.write_text("{seconds: 30, arrivals: {per_second: 1}, prompt: {mean: 200}, output: {mean: 20}}\n")
    point = highest_rate(Files(fleet, workload), [], Objectives(1000.0, 60.0), 0.9, lambda now: None)
    assert point is not None
    assert point.result.summary.goodput.share >= 0.9
    rate = float(point.settings[-1].rpartition("=")[2])
    assert 3 < rate < 30
