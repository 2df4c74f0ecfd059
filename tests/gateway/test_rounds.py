import asyncio
from collections.abc import Callable

import pytest

from gateway.rounds import Rounds, Wakeup
from tests.support.waiting import PATIENCE_SECONDS


async def test_a_round_wakes_all_in_one_turn() -> None:
    loop = asyncio.get_running_loop()
    rounds, turns, woken = Rounds(lambda: 0.02), 0, loop.create_future()
    woken_in: list[int] = []
    due = rounds.next()

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not woken.done():
            loop.call_soon(turn)

    def wake() -> None:
        woken_in.append(turns)
        if len(woken_in) == 100:
            woken.set_result(None)

    for _ in range(100):
        rounds.call_at(due, wake)
    turn()
    await asyncio.wait_for(woken, 30)
    # Event loops round timers to milliseconds.
    assert loop.time() >= due - 0.001
    assert len(set(woken_in)) == 1


async def test_streams_share_rounds_whenever_they_ask() -> None:
    now = asyncio.get_running_loop().time()
    rounds = Rounds(lambda: now)
    first = rounds.next()
    await asyncio.sleep(0)
    assert first == rounds.next() == 2 * now


async def test_a_sleeper_wakes_when_due_or_now() -> None:
    wakeup, clock = Wakeup(), asyncio.get_running_loop().time
    due = clock() + 0.03
    sleeper = asyncio.create_task(wakeup.sleep(due, timed=False))
    await asyncio.sleep(0)
    assert wakeup.awaited
    wakeup.when_due()
    await asyncio.wait_for(sleeper, PATIENCE_SECONDS)
    # Event loops round timers to milliseconds.
    assert clock() >= due - 0.001
    assert not wakeup.awaited
    sleeper = asyncio.create_task(wakeup.sleep(clock() + 60, timed=True))
    await asyncio.sleep(0)
    wakeup.now()
    await asyncio.wait_for(sleeper, PATIENCE_SECONDS)


@pytest.mark.parametrize("timed", [True, False])
async def test_a_sleep_has_one_timer(timed: bool) -> None:
    wakeup, timers = Wakeup(), list[Callable[[], None]]()
    due = asyncio.get_running_loop().time() + 60
    sleeper = asyncio.create_task(wakeup.sleep(due, lambda _, wake: timers.append(wake), timed=timed))
    await asyncio.sleep(0)
    assert len(timers) == timed
    for _ in range(3):
        wakeup.when_due()
    [wake] = timers
    wake()
    await asyncio.wait_for(sleeper, PATIENCE_SECONDS)


async def test_a_sleeper_that_is_cancelled_waits_no_more() -> None:
    wakeup = Wakeup()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wakeup.sleep(0.0, timed=False), 0.01)
    wakeup.when_due()
    assert not wakeup.awaited
