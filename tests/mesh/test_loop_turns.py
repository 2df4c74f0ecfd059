import asyncio

from mesh.loop_turns import LoopTurns


async def test_one_caller_goes_on_in_each_pass_of_the_loop() -> None:
    loop, turns, passes, went_on = asyncio.get_running_loop(), LoopTurns(), 0, list[int]()

    def count() -> None:
        nonlocal passes
        passes += 1
        if len(went_on) < 5:
            loop.call_soon(count)

    async def caller() -> None:
        await turns.next()
        went_on.append(passes)

    count()
    await asyncio.gather(*(caller() for _ in range(5)))
    assert len(set(went_on)) == 5
