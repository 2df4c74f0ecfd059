"""Whether first tokens come when placement said."""

from pathlib import Path

import pytest

from mesh.cost_file import CostFile, save_costs
from mesh.costs import CostModel
from tests.support.simulation import make_fleet, make_workload, ran

# About DeepSeek-R1 on four H200.
COSTS = CostModel(
    decode_steps=((1.0, 20.0), (64.0, 36.0)), prefill_tokens_per_second=9000.0, prefill_step_ms=29.0, request_ms=10.0
)
LENGTHS = {
    "prompt": {"mean": 1500, "kind": "lognormal", "spread": 1.2, "most": 12_000},
    "output": {"mean": 200, "kind": "lognormal", "spread": 0.2, "most": 800},
}


@pytest.mark.parametrize(("prefill", "per_second"), [(4, 10.0), (0, 5.0)])
def test_prompts_of_any_length_take_their_steps(prefill: int, per_second: float, tmp_path: Path) -> None:
    save_costs(CostFile(COSTS), tmp_path / "costs.json")
    each = {"max_requests": 96, "max_step_tokens": 4096, "total_blocks": 8500}
    fleet = make_fleet(
        costs=tmp_path / "costs.json",
        prefill={"replicas": prefill, **each},
        decode={"replicas": 4, "can_prefill": not prefill, "captured_rows": 96, **each},
    )
    _, result = ran(fleet, make_workload(per_second, seconds=30, warm_up_seconds=8, **LENGTHS))
    assert result.predictions is not None
    # While placement took a step for nothing but its tokens, 62 and 53% did.
    assert result.predictions.ttft_within_20_percent > 0.9
