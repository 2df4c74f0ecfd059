import pytest

from mesh.domain.shares import Census, Share


def census(**requests: int) -> Census:
    counted = Census()
    for tenant, count in requests.items():
        for _ in range(count):
            counted.add(Share(tenant))
    return counted


def test_a_lone_tenants_next_request_waits_for_everything() -> None:
    assert census(a=500).ahead(Share("a")) == census().ahead(Share("a")) == 1.0


def test_a_tenants_first_request_hardly_waits_for_another_tenants_500() -> None:
    assert census(a=499).ahead(Share("b")) == pytest.approx(2 / 500)


def test_a_tenant_with_its_part_waits_for_all_that_wait() -> None:
    counted = census(a=50, b=50)
    assert counted.ahead(Share("a")) == counted.ahead(Share("b")) == 1.0


def test_a_heavier_tenant_has_a_larger_part() -> None:
    counted = census(a=60, b=39)
    assert counted.ahead(Share("b")) == pytest.approx(0.8)
    assert counted.ahead(Share("b", weight=3.0)) == pytest.approx(0.4 * 4 / 3)


def test_what_was_removed_no_longer_counts() -> None:
    counted = census(a=1, b=1)
    counted.remove(Share("b"))
    assert counted.ahead(Share("a")) == 1.0
