"""Workers of several ranks: requests are spread over them, and what one computes all wait for."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mesh.cost_file import CostFile, save_costs
from mesh.costs import CostModel
from mesh.domain.workers import WorkerRole
from mesh.rank_choice import RankOutlook, choose_rank
from sim import lockstep
from sim.asked import SyntheticWorkload
from sim.result import Result
from sim.simulation import SimulatedMesh
from tests.support.simulation import make_fleet, make_workload, ran

STEP_MS, PROMPT_TOKENS, PROMPT_MS = 10.0, 1000, 100.0
COSTS = CostModel(
    decode_steps=((1.0, STEP_MS),),
    prefill_tokens_per_second=1000 * PROMPT_TOKENS / PROMPT_MS,
    decode_beside_prompts=0.0,
    handover_ms=0.0,
)
LONG = {"prompt": {"mean": PROMPT_TOKENS}, "output": {"mean": 100}}


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    save_costs(CostFile(COSTS), path)
    return str(path)


def served(
    costs: str, decode: dict[str, Any], per_second: float = 3.0, seconds: float = 12.0, **fleet: Any
) -> tuple[SimulatedMesh, Result]:
    group = {"max_step_tokens": PROMPT_TOKENS + 64, "context_parallel_tokens": None, **decode}
    workload = make_workload(per_second=per_second, seconds=seconds, **LONG)
    return ran(make_fleet(costs=costs, decode=group, **fleet), workload)


def test_a_prompt_on_one_rank_holds_up_tokens_on_all(costs: str) -> None:
    _, apart = served(costs, {"replicas": 4, "ranks": 1}, seconds=15)
    _, together = served(costs, {"replicas": 1, "ranks": 4}, seconds=15)
    assert apart.summary.tpot_ms is not None and together.summary.tpot_ms is not None
    # Each second has 3 prompts of 0.1 s: on four workers one of them meets a quarter of these, on one worker all.
    assert together.summary.tpot_ms.mean > 1.15 * apart.summary.tpot_ms.mean
    assert together.summary.itl_ms is not None
    assert together.summary.itl_ms.p50 == pytest.approx(STEP_MS)
    assert together.summary.itl_ms.p99 == pytest.approx(PROMPT_MS)


def test_a_prompt_of_all_ranks_takes_less_time(costs: str) -> None:
    group = {"replicas": 1, "ranks": 4}
    _, divided = served(costs, {**group, "context_parallel_tokens": PROMPT_TOKENS}, per_second=0.5)
    _, whole = served(costs, {**group, "context_parallel_tokens": 2 * PROMPT_TOKENS}, per_second=0.5)
    assert divided.summary.ttft_ms is not None and whole.summary.ttft_ms is not None
    assert divided.summary.ttft_ms.p50 == pytest.approx(PROMPT_MS / 4)
    assert whole.summary.ttft_ms.p50 == pytest.approx(PROMPT_MS)


def test_a_prompt_of_one_rank_takes_its_share(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(CostFile(msgspec.structs.replace(COSTS, prefill_alone=0.5)), path)
    _, result = served(str(path), {"replicas": 1, "ranks": 4}, per_second=0.5)
    assert result.summary.ttft_ms is not None
    assert result.summary.ttft_ms.p50 == pytest.approx(PROMPT_MS / 2)


def test_bounded_steps_keep_tokens_pace_and_delay_prompts(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(CostFile(msgspec.structs.replace(COSTS, decode_beside_prompts=1.0)), path)
    group, bound_ms = {"replicas": 1, "ranks": 2, "prompt_wait_steps": 0}, 3 * STEP_MS
    _, whole = served(str(path), group, per_second=2.0)
    _, bounded = served(str(path), {**group, "mixed_step_ms": bound_ms}, per_second=2.0)
    before, after = whole.summary, bounded.summary
    assert before.itl_ms is not None and after.itl_ms is not None
    assert before.ttft_ms is not None and after.ttft_ms is not None
    assert before.itl_ms.p99 == pytest.approx(STEP_MS + PROMPT_MS)
    assert after.itl_ms.p99 == pytest.approx(bound_ms, rel=0.1)
    # Two thirds of each step are the prompt's.
    assert after.ttft_ms.p50 > 1.25 * before.ttft_ms.p50


def test_prompts_that_wait_for_each_other_hold_up_fewer_steps(costs: str) -> None:
    _, at_once = served(costs, {"replicas": 1, "ranks": 4, "prompt_wait_steps": 0}, per_second=5.0)
    _, aligned = served(costs, {"replicas": 1, "ranks": 4}, per_second=5.0)
    before, after = at_once.summary, aligned.summary
    assert before.tpot_ms is not None and after.tpot_ms is not None
    assert before.ttft_ms is not None and after.ttft_ms is not None
    assert after.tpot_ms.mean < 0.95 * before.tpot_ms.mean
    assert after.ttft_ms.p50 > before.ttft_ms.p50


def test_the_wait_for_each_other_is_foretold(costs: str) -> None:
    near = {}
    for steps in (0, 16):
        _, result = served(costs, {"replicas": 1, "ranks": 4, "prompt_wait_steps": steps})
        assert result.predictions is not None
        near[steps] = result.predictions.ttft_within_20_percent
    # Without knowledge of the steps of other ranks: 0.89, and 0.45 of those that wait.
    assert min(near.values()) > 0.8


@pytest.mark.parametrize("ranks", [1, 2])
def test_few_prompt_tokens_take_what_decoding_requests_take(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "costs.json"
    rising = msgspec.structs.replace(COSTS, decode_steps=((1.0, STEP_MS), (41.0, STEP_MS + 40)))
    save_costs(CostFile(rising), path)
    decode = {"replicas": 1, "ranks": ranks, "captured_rows": 64}
    fleet = make_fleet(costs=str(path), decode=decode)
    workload = make_workload(per_second=0.5, prompt={"mean": 21}, output={"mean": 30}, seconds=30)
    _, result = ran(fleet, workload)
    assert result.summary.ttft_ms is not None
    # As a chunk of a prompt it would take 2.
    assert result.summary.ttft_ms.p50 == pytest.approx(STEP_MS + 20, rel=0.05)


def test_requests_are_spread_evenly_over_the_ranks(costs: str) -> None:
    fleet = make_fleet(costs=costs, decode={"replicas": 1, "ranks": 4})
    mesh, running = SimulatedMesh(fleet, 0), list[list[int]]()

    def look() -> None:
        (worker,) = mesh.lifecycle.workers[WorkerRole.DECODE]
        assert worker.rank is not None
        loads = [status.load for status in worker.rank.statuses]
        running.append([load.running_requests + load.waiting_requests for load in loads])

    mesh.timeline.every(0.5, look)
    mesh.run(SyntheticWorkload(make_workload(per_second=20.0, seconds=10, **LONG)))
    busy = [each for each in running if sum(each) >= 8]
    assert len(busy) > 10
    # The ranks' prompts take turns: one rank's answers have ended while another's prompts wait.
    assert max(max(each) - min(each) for each in busy) <= 12


@pytest.mark.parametrize(("per_second", "seconds"), [(3.0, 24.0), (12.0, 8.0)])
def test_requests_go_to_the_rank_that_the_scheduler_booked(
    costs: str, per_second: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    went = list[tuple[int | None, int]]()

    def choose(ranks: Sequence[RankOutlook], tokens: int, computes: bool, most: int, booked: int | None) -> int:
        went.append((booked, choose_rank(ranks, tokens, computes, most, booked)))
        return went[-1][1]

    monkeypatch.setattr(lockstep, "choose_rank", choose)
    served(costs, {"replicas": 1, "ranks": 4}, per_second, seconds)
    assert len(went) > 60
    assert sum(booked == chosen for booked, chosen in went) > 0.9 * len(went)
    # No rank is booked more often than others.
    assert max(Counter(booked for booked, _ in went).values()) < 0.4 * len(went)


def test_prompts_go_to_the_booked_ranks(costs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    booked_ranks = list[int | None]()

    def choose(ranks: Sequence[RankOutlook], tokens: int, computes: bool, most: int, booked: int | None) -> int:
        booked_ranks.append(booked)
        return choose_rank(ranks, tokens, computes, most, booked)

    monkeypatch.setattr(lockstep, "choose_rank", choose)
    prefill = {"replicas": 1, "ranks": 2, "max_step_tokens": 4096}
    _, result = served(costs, {"replicas": 1, "ranks": 2, "can_prefill": False}, seconds=10, prefill=prefill)
    assert len(booked_ranks) == 2 * result.summary.requests
    assert set(booked_ranks) == {0, 1}


def test_every_token_has_its_time(costs: str) -> None:
    mesh, _ = served(costs, {"replicas": 1, "ranks": 2}, seconds=10)
    for live in mesh.ended:
        assert live.record.message_tokens == [1] * live.tokens


def test_prompts_on_a_prefill_worker_delay_no_token(costs: str) -> None:
    _, result = served(
        costs,
        {"replicas": 1, "ranks": 2, "can_prefill": False},
        seconds=10,
        prefill={"replicas": 1, "ranks": 2, "max_step_tokens": 4096},
    )
    assert result.roles["prefill"].prompts == result.summary.completed == result.summary.requests
    assert result.summary.tpot_ms is not None
    # The second token waits for the KV, and for the end of a step.
    assert result.summary.tpot_ms.p99 == pytest.approx(STEP_MS, rel=0.06)


@pytest.mark.parametrize("kind", ["die", "freeze", "slow_link", "slow_steps", "upgrade"])
def test_nothing_is_lost_when_such_a_worker_fails(costs: str, kind: str) -> None:
    faults = [{"kind": kind, "role": role, "at": 2, "seconds": 1} for role in ("prefill", "decode")]
    served(costs, {"replicas": 2, "ranks": 2}, seconds=5, prefill={"replicas": 1, "ranks": 2}, faults=faults)
