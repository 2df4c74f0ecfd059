import pytest

from bench.served_placement import Cost


def test_a_cores_share_is_of_all_requests_and_reports() -> None:
    cost = Cost(workers=1000, placement_ms=1.0, report_ms=0.2)
    assert cost.busy(requests_per_second=0.5, report_seconds=2.0) == pytest.approx(0.5 + 0.1)
