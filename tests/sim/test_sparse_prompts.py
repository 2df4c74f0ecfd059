"""Fleets whose workers attend sparsely to long prompts."""

from pathlib import Path
from typing import Any

import pytest

from mesh.cost_file import CostFile, save_costs
from mesh.costs import CostModel
from tests.support.simulation import make_fleet, make_workload, ran

# Attention takes most of a prompt of thousands of tokens.
COSTS = CostModel(prefill_tokens_per_second=10_000.0, prefill_pairs_ms=200.0, sparse_pairs_ms=10.0)
SLOW = 1.5
SPARSE: dict[str, Any] = {"recall": 0.9, "from_tokens": 1024}
SPARSE_MS = COSTS.prefill_ms(1024) + COSTS.sparse_prefill_ms(4096 - 1024, 1024)


def costs_file(folder: Path) -> str:
    save_costs(CostFile(COSTS), folder / "costs.json")
    return str(folder / "costs.json")


@pytest.mark.parametrize(("sparse", "expected_ms"), [(SPARSE, SPARSE_MS), ({}, COSTS.prefill_ms(4096))])
def test_a_lone_prompt_takes_the_cost_models_time(tmp_path: Path, sparse: dict[str, Any], expected_ms: float) -> None:
    workload = make_workload(arrivals={"kind": "steady", "per_second": 0.1}, seconds=11, prompt={"mean": 4096})
    _, result = ran(make_fleet(costs=costs_file(tmp_path), sparse_prefill=sparse), workload)
    assert result.summary.ttft_ms is not None
    assert result.summary.ttft_ms.p50 == pytest.approx(expected_ms)


def test_workers_measure_both_kinds_and_placement_predicts_each(tmp_path: Path) -> None:
    fleet = make_fleet(
        costs=costs_file(tmp_path),
        sparse_prefill=SPARSE,
        prefill={"replicas": 2, "max_step_tokens": 1024, "slow": 0.999, "slow_factor": SLOW},
        decode={"replicas": 2, "can_prefill": False},
    )
    # A third of the prompts are exact, and one in a few waits for another.
    lengths = {"mean": 3000, "kind": "quantiles", "quantiles": [300, 1000, 4000, 8000], "most": 8000}
    workload = make_workload(1.0, prompt=lengths, output={"mean": 4}, seconds=100)
    mesh, _ = ran(fleet, workload)
    for worker in mesh.scheduler.registry.workers():
        exact, sparse = worker.load.exact_prompts, worker.load.sparse_prompts
        if not worker.identity.worker_id.startswith("prefill"):
            assert exact is sparse is None
            continue
        assert exact is not None and sparse is not None
        exact_ms = SLOW * COSTS.prompt_token_ms(exact.context_tokens)
        assert 1000 / exact.tokens_per_second == pytest.approx(exact_ms, rel=0.1)
        sparse_ms = SLOW * COSTS.prompt_token_ms(sparse.context_tokens, sparse=True)
        assert 1000 / sparse.tokens_per_second == pytest.approx(sparse_ms, rel=0.1)
    # The time of shorter ones is mostly the push, which their first tokens overtake.
    ratios = [
        live.predicted_ttft_ms / 1000 / live.record.ttft_s
        for live in mesh.ended[20:]
        if live.predicted_ttft_ms and live.record.ttft_s and (live.record.prompt_tokens or 0) > 2048
    ]
    assert sum(0.9 < ratio < 1.1 for ratio in ratios) > 0.9 * len(ratios) > 10
