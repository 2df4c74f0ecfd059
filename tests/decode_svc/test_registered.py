"""Which prefill workers a decode worker calls."""

import asyncio

import pytest

from decode_svc import registered
from decode_svc.registered import RegisteredPrefills
from mesh.domain.targets import WorkerTarget
from mesh.errors import PermissionDenied
from tests.support.scheduling import ManualClock

TARGET = WorkerTarget("prefill-1", "first", "127.0.0.1:1")
LEASE_SECONDS = 10.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "NEWS_SECONDS", 0.05)


def listing(clock: ManualClock, **endpoints: str) -> RegisteredPrefills:
    prefills = RegisteredPrefills(clock)
    prefills.replace({name.replace("_", "-"): endpoint for name, endpoint in endpoints.items()}, LEASE_SECONDS)
    return prefills


async def test_a_registered_worker_is_called_at_its_endpoint_alone() -> None:
    await listing(ManualClock(), prefill_1=TARGET.endpoint).check(TARGET)
    for elsewhere in (
        listing(ManualClock(), prefill_1="127.0.0.1:2"),
        listing(ManualClock(), prefill_2=TARGET.endpoint),
    ):
        with pytest.raises(PermissionDenied, match=r"knows no prefill worker of that id at 127.0.0.1:1"):
            await elsewhere.check(TARGET)


async def test_before_the_first_snapshot_nobody_is_called() -> None:
    with pytest.raises(PermissionDenied):
        await RegisteredPrefills(ManualClock()).check(TARGET)


async def test_a_placement_may_be_ahead_of_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "NEWS_SECONDS", 10.0)
    prefills = listing(ManualClock())
    checking = asyncio.create_task(prefills.check(TARGET))
    await asyncio.sleep(0)
    prefills.replace({TARGET.worker_id: TARGET.endpoint}, LEASE_SECONDS)
    await checking


async def test_a_worker_that_left_is_known_for_a_lease_more() -> None:
    clock = ManualClock()
    prefills = listing(clock, prefill_1=TARGET.endpoint)
    # A scheduler that was just started lists no worker, more than once.
    prefills.replace({}, LEASE_SECONDS)
    prefills.replace({}, LEASE_SECONDS)
    clock.now += LEASE_SECONDS - 1
    await prefills.check(TARGET)
    clock.now += 1
    with pytest.raises(PermissionDenied):
        await prefills.check(TARGET)


async def test_a_worker_that_one_of_two_schedulers_lists_is_called() -> None:
    prefills = RegisteredPrefills(ManualClock())
    prefills.replace({"prefill-1": TARGET.endpoint}, LEASE_SECONDS, "first")
    prefills.replace({}, LEASE_SECONDS, "second")
    await prefills.check(TARGET)
