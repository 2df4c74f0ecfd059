"""Redis, or Valkey, as services that keep state there reach it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import Counter
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from mesh.breaker import CircuitBreaker
from mesh.config import RedisConfig
from mesh.errors import ConfigError, MeshError

_MAX_CONNECTIONS = 16
# After so many failures in a row Redis is not asked for so long.
_FAILURES = 2
_REST_SECONDS = 1.0


class RedisLink:
    """`answer = await link.ask(link.client.get, key)`: no call waits for longer than the configuration says, and a
    server that does not answer is left alone for a while.
    """

    def __init__(self, config: RedisConfig, what: str, unavailable: type[MeshError], failures: Counter) -> None:
        """what: names what is kept there in errors, which are of the type `unavailable`; `failures` counts them.

        Raises ConfigError if the URL is none of Redis.
        """
        self.client = _connect(config)
        self._what = what
        self._unavailable = unavailable
        self._failures = failures
        self._breaker = CircuitBreaker(time.monotonic, _FAILURES, _REST_SECONDS)

    async def ask(self, call: Callable[..., Awaitable[Any]], *arguments: Any, **options: Any) -> Any:
        if not self._breaker.allows():
            raise self._unavailable(f"{self._what} did not answer lately, and is not asked now")
        try:
            answer = await call(*arguments, **options)
        except (RedisError, OSError) as error:
            self._breaker.failed()
            self._failures.inc()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The client library may turn a cancellation that meets a broken connection into this error.
                raise asyncio.CancelledError from error
            raise self._unavailable(f"{self._what} does not answer: {error}") from error
        self._breaker.succeeded()
        return answer

    async def close(self) -> None:
        await self.client.aclose()


def _connect(config: RedisConfig) -> Redis:
    assert config.redis_url is not None
    try:
        pool = BlockingConnectionPool.from_url(
            config.redis_url,
            max_connections=_MAX_CONNECTIONS,
            timeout=config.timeout_seconds,
            socket_timeout=config.timeout_seconds,
            socket_connect_timeout=config.timeout_seconds,
            # Without an answer the caller goes on at once: it does not wait for another try.
            retry=Retry(NoBackoff(), 0),
        )
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}") from error
    return Redis.from_pool(pool)
