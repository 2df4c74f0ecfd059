"""Workers whose pools hold a few requests, while they have places for many."""

from statistics import fmean

import pytest

from tests.support.simulation import make_fleet, make_workload, ran

LENGTHS = {
    "prompt": {"mean": 1500, "kind": "lognormal", "spread": 0.6, "most": 6000},
    "output": {"mean": 300, "kind": "lognormal", "spread": 0.6, "most": 1500},
}


@pytest.mark.parametrize(("prefill", "per_second"), [(0, 3.0), (2, 3.5)])
def test_the_wait_for_blocks_is_foretold(prefill: int, per_second: float) -> None:
    decode = {"replicas": 4, "total_blocks": 160, "max_requests": 32, "max_step_tokens": 4096}
    fleet = make_fleet(prefill={"replicas": prefill}, decode={**decode, "can_prefill": not prefill})
    mesh, _ = ran(fleet, make_workload(per_second, seconds=60, **LENGTHS))
    took = [(live.record.ttft_s or 0.0) * 1000 for live in mesh.ended]
    foretold = [live.predicted_ttft_ms or 0.0 for live in mesh.ended]
    # Prompts alone take 300 ms on average. While those who wait counted as running, 0.64 and 0.40 of it was foretold.
    assert fmean(took) > 2500
    assert fmean(foretold) == pytest.approx(fmean(took), rel=0.25)
