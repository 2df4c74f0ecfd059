"""What a service does all the time ends with it, and ends it if it fails."""

import asyncio

import pytest

from mesh.background import background
from mesh.errors import ConfigError


async def test_works_run_until_the_block_ends() -> None:
    begun, cancelled = asyncio.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with background(work()):
        await begun.wait()
        assert not cancelled
    assert cancelled


async def test_a_failed_work_ends_the_block_with_its_error() -> None:
    async def work() -> None:
        raise ConfigError("the work is broken")

    with pytest.raises(ConfigError, match="the work is broken"):
        async with background(work(), asyncio.sleep(3600)):
            await asyncio.get_running_loop().create_future()


async def test_an_error_of_the_block_is_raised_as_it_is() -> None:
    with pytest.raises(ConfigError, match="the block is broken"):
        async with background(asyncio.sleep(3600)):
            raise ConfigError("the block is broken")
