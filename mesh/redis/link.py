"""How services reach Redis, or Valkey, if they keep state there."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from prometheus_client import Counter

from mesh.breaker import CircuitBreaker
from mesh.config import RedisConfig
from mesh.errors import MeshError
from mesh.redis.commands import Command, RedisFailure, RedisRefusal, Script, UnknownScript
from mesh.redis.server import RedisServer

# After this many failures in a row, Redis is not asked for this long.
_FAILURES = 2
_REST_SECONDS = 1.0


class RedisLink:
    """`[answer] = await link.ask((b"GET", key))`: no call waits longer than the configured timeout, and a server that
    does not answer is left alone for a while.
    """

    def __init__(self, config: RedisConfig, what: str, unavailable: type[MeshError], failures: Counter) -> None:
        """what: names the stored data in errors, which have the type `unavailable`; `failures` counts them.

        Raises ConfigError if the configuration is invalid.
        """
        server = RedisServer.of(config)
        # Here, so that services without Redis do not load redis-py.
        from mesh.redis.client import RedisClient

        self._client = RedisClient(server, config.timeout_seconds)
        self._name = server.name
        self._timeout_seconds = config.timeout_seconds
        self._what = what
        self._unavailable = unavailable
        self._failures = failures
        self._breaker = CircuitBreaker(time.monotonic, _FAILURES, _REST_SECONDS)
        self._calls: set[asyncio.Task[list[Any]]] = set()

    async def ask(self, *commands: Command) -> list[Any]:
        """The answers to `commands`, in one round trip."""
        self._check_breaker()
        return await self._finished(self._client.call(commands))

    async def evaluate(self, script: Script, key: bytes, *arguments: bytes) -> Any:
        """The script's result for one key."""
        self._check_breaker()
        [answer] = await self._finished(self._evaluated(script, b"1", key, *arguments))
        return answer

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._client.close()

    def _check_breaker(self) -> None:
        if not self._breaker.allows():
            raise self._unavailable(f"{self._what} did not answer lately, and is not asked now")

    async def _evaluated(self, script: Script, *words: bytes) -> list[Any]:
        try:
            return await self._client.call([(b"EVALSHA", script.digest, *words)])
        except UnknownScript:
            return await self._client.call([(b"EVAL", script.text, *words)])

    async def _finished(self, call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        """The call's answers. It goes on if its caller is cancelled: redis-py would have to connect again."""
        task = asyncio.create_task(self._bounded(call))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _bounded(self, call: Coroutine[Any, Any, list[Any]]) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answers = await call
        except RedisRefusal as error:
            self._breaker.succeeded()
            raise self._failed(error) from error
        except RedisFailure as error:
            self._breaker.failed()
            raise self._failed(error) from error
        except TimeoutError as error:
            self._breaker.failed()
            raise self._failed(f"{self._name}: it did not answer in time") from error
        self._breaker.succeeded()
        return answers

    def _failed(self, reason: RedisFailure | str) -> MeshError:
        self._failures.inc()
        return self._unavailable(f"{self._what} does not answer: {reason}")
