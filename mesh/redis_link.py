"""How services reach Redis, or Valkey, if they keep state there."""

import asyncio
import hashlib
import time
from typing import Any

from prometheus_client import Counter

from mesh.breaker import CircuitBreaker
from mesh.config import RedisConfig
from mesh.errors import MeshError
from mesh.redis_commands import Command
from mesh.redis_connection import RedisConnection, RedisFailure, RedisRefusal
from mesh.redis_server import RedisServer

# After this many failures in a row, Redis is not asked for this long.
_FAILURES = 2
_REST_SECONDS = 1.0


class Script:
    """A Lua script that is called by its digest; Redis gets its text only if it does not know the digest."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


class RedisLink:
    """`[answer] = await link.ask((b"GET", key))`: no call waits longer than the configured timeout, and a server that
    does not answer is left alone for a while.
    """

    def __init__(self, config: RedisConfig, what: str, unavailable: type[MeshError], failures: Counter) -> None:
        """what: names the stored data in errors, which have the type `unavailable`; `failures` counts them.

        Raises ConfigError if the configuration is invalid.
        """
        self._connection = RedisConnection(RedisServer.of(config), config.timeout_seconds)
        self._timeout_seconds = config.timeout_seconds
        self._what = what
        self._unavailable = unavailable
        self._failures = failures
        self._breaker = CircuitBreaker(time.monotonic, _FAILURES, _REST_SECONDS)

    async def ask(self, *commands: Command) -> list[Any]:
        """The answers to `commands`, in one round trip."""
        try:
            return await self._ask(*commands)
        except RedisRefusal as error:
            raise self._failed(error) from error

    async def evaluate(self, script: Script, key: bytes, *arguments: bytes) -> Any:
        """The script's result for one key."""
        ends_at = asyncio.get_running_loop().time() + self._timeout_seconds
        try:
            [answer] = await self._ask((b"EVALSHA", script.digest, b"1", key, *arguments))
        except RedisRefusal as error:
            if not error.is_unknown_script:
                raise self._failed(error) from error
            [answer] = await self._tell(script, ends_at, key, *arguments)
        return answer

    async def _tell(self, script: Script, ends_at: float, key: bytes, *arguments: bytes) -> list[Any]:
        try:
            async with asyncio.timeout_at(ends_at):
                return await self.ask((b"EVAL", script.text, b"1", key, *arguments))
        except TimeoutError:
            self._breaker.failed()
            raise self._failed(RedisFailure("no answer in time")) from None

    def close(self) -> None:
        self._connection.close()

    async def _ask(self, *commands: Command) -> list[Any]:
        """The answers; raises RedisRefusal as well."""
        if not self._breaker.allows():
            raise self._unavailable(f"{self._what} did not answer lately, and is not asked now")
        try:
            answers = await self._connection.call(commands)
        except RedisRefusal:
            self._breaker.succeeded()
            raise
        except RedisFailure as error:
            self._breaker.failed()
            raise self._failed(error) from error
        self._breaker.succeeded()
        return answers

    def _failed(self, error: RedisFailure) -> MeshError:
        self._failures.inc()
        return self._unavailable(f"{self._what} does not answer: {error}")
