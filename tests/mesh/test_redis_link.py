"""A link to Redis whose answers are slow, on a clock that the test puts forward."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter

from mesh.config import RedisConfig
from mesh.errors import IndexUnavailable
from mesh.redis_link import RedisLink, Script
from tests.support.answering_redis import AnsweringRedis, answering_redis

TIMEOUT_SECONDS = 60.0
# Turns of the loop in which a call ends whose time is over.
TURNS = 100
FAILURES = Counter("failures", "Of these tests", registry=None)


class SteppedLoop(asyncio.SelectorEventLoop):
    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


def run(test: Callable[[SteppedLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SteppedLoop)
        runner.run(test(loop))


def link_to(redis: AnsweringRedis, **login: str) -> RedisLink:
    config = RedisConfig.model_validate(
        {"redis_url": f"redis://127.0.0.1:{redis.port}", "timeout_seconds": TIMEOUT_SECONDS, **login}
    )
    return RedisLink(config, "the index", IndexUnavailable, FAILURES)


async def over_after(call: "asyncio.Task[Any]", loop: SteppedLoop, seconds: float) -> bool:
    """Whether the call has failed once so much more time has passed."""
    loop.ahead += seconds
    for _ in range(TURNS):
        await asyncio.sleep(0)
    return call.done() and isinstance(call.exception(), IndexUnavailable)


def test_a_call_that_has_to_connect_first_takes_no_longer_than_others() -> None:
    async def slow_login(loop: SteppedLoop) -> None:
        async with answering_redis() as redis:
            link = link_to(redis, redis_password="password")
            call = asyncio.create_task(link.ask((b"GET", b"key")))
            assert (await redis.commands.get())[0] == b"AUTH"
            assert not await over_after(call, loop, 40)
            redis.answer(b"+OK\r\n")
            assert await redis.commands.get() == (b"GET", b"key")
            assert await over_after(call, loop, 25)
            # The connection is not late yet, and serves others.
            other = asyncio.create_task(link.ask((b"GET", b"other")))
            assert await redis.commands.get() == (b"GET", b"other")
            redis.answer(b"$5\r\nfirst\r\n$6\r\nsecond\r\n")
            assert (await other, redis.connections) == ([b"second"], 1)
            link.close()

    run(slow_login)


def test_a_script_that_redis_has_to_be_told_takes_no_longer_than_others() -> None:
    async def slow_script(loop: SteppedLoop) -> None:
        async with answering_redis() as redis:
            link = link_to(redis)
            call = asyncio.create_task(link.evaluate(Script("return 1"), b"key"))
            assert (await redis.commands.get())[0] == b"EVALSHA"
            assert not await over_after(call, loop, 40)
            redis.answer(b"-NOSCRIPT No matching script.\r\n")
            assert (await redis.commands.get())[0] == b"EVAL"
            assert await over_after(call, loop, 25)
            link.close()

    run(slow_script)


def test_a_script_that_redis_does_not_know_is_told() -> None:
    async def told(loop: SteppedLoop) -> None:
        async with answering_redis() as redis:
            link = link_to(redis)
            call = asyncio.create_task(link.evaluate(Script("return 1"), b"key"))
            assert (await redis.commands.get())[0] == b"EVALSHA"
            redis.answer(b"-NOSCRIPT No matching script.\r\n")
            assert await redis.commands.get() == (b"EVAL", b"return 1", b"1", b"key")
            redis.answer(b":1\r\n")
            assert await call == 1
            link.close()

    run(told)
