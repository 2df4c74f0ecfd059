"""Redis, or Valkey, as services that keep state there reach it."""

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

# After so many failures in a row Redis is not asked for so long.
_FAILURES = 2
_REST_SECONDS = 1.0


class Script:
    """Lua that Redis knows by its digest, or is told."""

    def __init__(self, text: str) -> None:
        self.text = text.encode()
        self.digest = hashlib.sha1(self.text, usedforsecurity=False).hexdigest().encode()


class RedisLink:
    """`[answer] = await link.ask((b"GET", key))`: no call waits for longer than the configuration says, and a server
    that does not answer is left alone for a while.
    """

    def __init__(self, config: RedisConfig, what: str, unavailable: type[MeshError], failures: Counter) -> None:
        """what: names what is kept there in errors, which are of the type `unavailable`; `failures` counts them.

        Raises ConfigError if the configuration is none of Redis.
        """
        self._connection = RedisConnection(RedisServer.of(config), config.timeout_seconds)
        self._timeout_seconds = config.timeout_seconds
        self._what = what
        self._unavailable = unavailable
        self._failures = failures
        self._breaker = CircuitBreaker(time.monotonic, _FAILURES, _REST_SECONDS)

    async def ask(self, *commands: Command) -> list[Any]:
        """Their answers, in one round trip."""
        try:
            return await self._ask(*commands)
        except RedisRefusal as error:
            raise self._failed(error) from error

    async def evaluate(self, script: Script, key: bytes, *arguments: bytes) -> Any:
        """What the script answers for one key."""
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
        """Raises RedisRefusal too."""
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
