"""A link to Redis whose answers are slow, on a clock that the test puts forward."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from prometheus_client import Counter

from mesh.config import RedisConfig
from mesh.errors import IndexUnavailable
from mesh.redis.commands import Script
from mesh.redis.link import RedisLink
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


async def take_turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def over_after(call: "asyncio.Task[Any]", loop: SteppedLoop, seconds: float) -> bool:
    """Whether the call has failed once so much more time has passed."""
    loop.ahead += seconds
    await take_turns()
    return call.done() and isinstance(call.exception(), IndexUnavailable)


def test_connecting_takes_no_longer_than_the_timeout() -> None:
    async def slow_login(loop: SteppedLoop) -> None:
        async with answering_redis() as redis:
            link = link_to(redis, redis_password="password")
            call = asyncio.create_task(link.ask((b"GET", b"key")))
            assert (await redis.commands.get())[0] == b"AUTH"
            assert not await over_after(call, loop, 40)
            redis.answer(b"+OK\r\n")
            assert await redis.commands.get() == (b"GET", b"key")
            assert await over_after(call, loop, 25)
            await link.close()

    run(slow_login)


def test_sending_a_script_takes_no_longer_than_the_timeout() -> None:
    async def slow_script(loop: SteppedLoop) -> None:
        async with answering_redis() as redis:
            link = link_to(redis)
            call = asyncio.create_task(link.evaluate(Script("return 1"), b"key"))
            assert (await redis.commands.get())[0] == b"EVALSHA"
            assert not await over_after(call, loop, 40)
            redis.answer(b"-NOSCRIPT No matching script.\r\n")
            assert (await redis.commands.get())[0] == b"EVAL"
            assert await over_after(call, loop, 25)
            await link.close()

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
            await link.close()

    run(told)


def test_a_caller_that_leaves_ends_no_connection() -> None:
    async def left(loop: SteppedLoop) -> None:
        async with answering_redis() as redis:
            link = link_to(redis)
            call = asyncio.create_task(link.ask((b"GET", b"key")))
            await redis.commands.get()
            call.cancel()
            await asyncio.wait([call])
            redis.answer(b"$5\r\nfirst\r\n")
            await take_turns()
            other = asyncio.create_task(link.ask((b"GET", b"other")))
            await redis.commands.get()
            redis.answer(b"$6\r\nsecond\r\n")
            assert (await other, redis.connections) == ([b"second"], 1)
            await link.close()

    run(left)


def test_a_late_answer_is_given_to_no_other_call() -> None:
    async def late(loop: SteppedLoop) -> None:
        async with answering_redis() as redis:
            link = link_to(redis)
            call = asyncio.create_task(link.ask((b"GET", b"key")))
            await redis.commands.get()
            assert await over_after(call, loop, 65)
            redis.answer(b"$5\r\nfirst\r\n")
            other = asyncio.create_task(link.ask((b"GET", b"other")))
            await redis.commands.get()
            redis.answer(b"$6\r\nsecond\r\n")
            assert await other == [b"second"]
            await link.close()

    run(late)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak Redis' protocol"),
        (b"-LOADING Redis is loading the dataset in memory\r\n", "refuses a command of the user 'default': LOADING"),
        (b"-WRONGTYPE Operation against a key\r\n", "refuses a command of the user 'default': WRONGTYPE"),
    ],
)
async def test_an_answer_without_a_value_is_an_error_in_words(answer: bytes, words: str) -> None:
    async with answering_redis(always=answer) as redis:
        link = link_to(redis)
        with pytest.raises(IndexUnavailable, match=words) as raised:
            await link.ask((b"GET", b"secret"))
        assert "secret" not in raised.value.message
        await link.close()


async def test_a_connection_that_ends_as_commands_leave_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(_: object, __: object) -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async with answering_redis() as redis:
        link = link_to(redis)
        # As uvloop's transport does.
        monkeypatch.setattr(asyncio.StreamWriter, "writelines", written)
        with pytest.raises(IndexUnavailable, match="it ended the connection before its first answer"):
            await link.ask((b"GET", b"key"))
        await link.close()
