"""How long a simulated step takes."""

from pathlib import Path

import pytest

from mesh.cost_file import CostFile, save_costs
from mesh.costs import CostModel
from tests.support.simulation import make_fleet, make_workload, ran

COSTS = CostModel(
    decode_steps=((1.0, 5.0),), prefill_tokens_per_second=100_000.0, launch_ms=35.0, captured_launch_ms=17.0
)


@pytest.mark.parametrize(("tokens", "ms"), [(100, 17.0), (1536, 17.0), (1537, 35.0), (8000, 80.0)])
def test_a_prompt_takes_at_least_its_launch(tokens: int, ms: float, tmp_path: Path) -> None:
    save_costs(CostFile(COSTS), tmp_path / "costs.json")
    decode = {"replicas": 1, "max_step_tokens": 8192, "captured_prompt_tokens": 1536}
    workload = make_workload(per_second=0.5, seconds=10, prompt={"mean": tokens}, output={"mean": 3})
    _, result = ran(make_fleet(costs=tmp_path / "costs.json", decode=decode), workload)
    assert result.summary.ttft_ms is not None
    assert result.summary.ttft_ms.p50 == pytest.approx(ms)
