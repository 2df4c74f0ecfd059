"""Long work of many clients on one thread."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from threading import Event

import pytest

from gateway import shortest_first
from gateway.shortest_first import ShortestFirst
from mesh.errors import Overloaded


class Line:
    """A line whose thread is busy until `free` is set."""

    def __init__(self, most_waiting: int) -> None:
        self.free, self.done = Event(), list[str]()
        self.thread = ShortestFirst("test", most_waiting)
        self.first = asyncio.create_task(self.thread.run(1000, self.free.wait))

    def add(self, name: str, size: int) -> asyncio.Task[None]:
        return asyncio.create_task(self.thread.run(size, partial(self.done.append, name)))


@asynccontextmanager
async def busy_line(most_waiting: int = 100) -> AsyncIterator[Line]:
    line = Line(most_waiting)
    await asyncio.sleep(0)
    try:
        yield line
    finally:
        line.free.set()
        await line.first
        line.thread.close()


async def test_of_those_that_wait_the_shortest_goes_first() -> None:
    async with busy_line() as line:
        tasks = [line.add("long", 50), line.add("short", 1), line.add("middle", 20), line.add("later", 20)]
        await asyncio.sleep(0)
        line.free.set()
        await asyncio.gather(*tasks)
        assert line.done == ["short", "middle", "later", "long"]


async def test_a_long_one_is_not_passed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortest_first, "PATIENCE", 4)
    async with busy_line() as line:
        long, short = line.add("long", 50), line.add("short", 10)
        await asyncio.sleep(0)
        line.free.set()
        while not long.done():
            # Whenever one is done, another waits.
            before, short = short, line.add("short", 10)
            await before
            assert len(line.done) < 100
        await short
        # It has rank 4 x 50, and a short one 4 x 10 more than the works that were begun before it came.
        assert line.done.index("long") in range(16, 20)


async def test_the_longest_is_refused_if_too_much_waits() -> None:
    async with busy_line(most_waiting=100) as line:
        long, short = line.add("long", 60), line.add("short", 50)
        with pytest.raises(Overloaded):
            await long
        line.free.set()
        await short
        assert line.done == ["short"]


@pytest.mark.parametrize("its_turn", [False, True], ids=["waiting", "at its turn"])
async def test_a_caller_that_leaves_delays_no_other(its_turn: bool) -> None:
    async with busy_line() as line:
        leaving, staying = line.add("leaving", 1), line.add("staying", 2)
        await asyncio.sleep(0)
        if its_turn:
            line.thread._pass_on()
        leaving.cancel()
        line.free.set()
        await staying
        assert line.done == ["staying"] and leaving.cancelled()


async def test_a_caller_that_leaves_makes_room() -> None:
    async with busy_line(most_waiting=100) as line:
        leaving = line.add("leaving", 60)
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        staying = line.add("staying", 60)
        line.free.set()
        await staying
        assert line.done == ["staying"]
