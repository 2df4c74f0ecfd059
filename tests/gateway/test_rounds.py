import asyncio

from gateway.rounds import Rounds


async def test_all_who_wait_for_a_round_wake_in_one_turn_of_the_loop() -> None:
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


async def test_rounds_are_the_same_for_streams_that_ask_at_different_times() -> None:
    now = asyncio.get_running_loop().time()
    rounds = Rounds(lambda: now)
    first = rounds.next()
    await asyncio.sleep(0)
    assert first == rounds.next() == 2 * now
