import asyncio
import logging

import pytest

from mesh.backoff import Backoff
from mesh.errors import SchedulerUnavailable
from tests.support.waiting import PATIENCE_SECONDS

AWAY = SchedulerUnavailable("none answers")


class Sleeps(list[float]):
    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


async def fail(backoff: Backoff, times: int) -> None:
    for _ in range(times):
        await backoff.failed("not reporting", AWAY)


@pytest.mark.parametrize("last", [5.0, 1.0])
async def test_each_failure_doubles_the_wait_up_to_the_last(last: float) -> None:
    sleeps = Sleeps()
    await fail(Backoff(logging.getLogger("test"), sleeps, last), 9)
    for slept, most in zip(sleeps, (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0), strict=True):
        assert min(most, last) / 2 <= slept <= min(most, last)


async def test_a_success_ends_the_row() -> None:
    sleeps = Sleeps()
    backoff = Backoff(logging.getLogger("test"), sleeps)
    await fail(backoff, 5)
    backoff.succeeded()
    await fail(backoff, 1)
    assert sleeps[-1] <= 0.1


async def test_a_row_of_failures_is_worth_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    backoff = Backoff(logging.getLogger("test"), Sleeps())
    with caplog.at_level(logging.DEBUG):
        for _ in range(2):
            await fail(backoff, 3)
            backoff.succeeded()
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "DEBUG"] * 2
    assert caplog.records[0].getMessage() == "not reporting: none answers"


async def test_a_loop_ends_although_its_call_lost_the_cancellation() -> None:
    """A call of gRPC that fails as it is cancelled raises its own error."""

    async def call_forever() -> None:
        backoff = Backoff(logging.getLogger("test"))
        while True:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                await backoff.failed("not reporting", AWAY)

    calling = asyncio.create_task(call_forever())
    await asyncio.sleep(0)
    calling.cancel()
    await asyncio.wait([calling], timeout=PATIENCE_SECONDS)
    assert calling.cancelled()
