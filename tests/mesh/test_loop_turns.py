import asyncio

from mesh.loop_turns import SMALL_BYTES, LoopTurns


async def test_one_caller_goes_on_in_each_pass_of_the_loop() -> None:
    loop, turns, passes, went_on = asyncio.get_running_loop(), LoopTurns(), 0, list[int]()

    def count() -> None:
        nonlocal passes
        passes += 1
        if len(went_on) < 5:
            loop.call_soon(count)

    async def caller() -> None:
        await turns.next(SMALL_BYTES + 1)
        went_on.append(passes)

    count()
    await asyncio.gather(*(caller() for _ in range(5)))
    assert len(set(went_on)) == 5


async def test_a_small_request_waits_for_no_large_one() -> None:
    turns = LoopTurns()
    large = asyncio.create_task(turns.next(SMALL_BYTES + 1))
    await asyncio.sleep(0)
    await turns.next(SMALL_BYTES)
    assert not large.done()
    await large
