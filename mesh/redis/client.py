"""redis-py, set up for one server, and its errors in our words.

redis-py takes 0.2 s to import and 26 MB, so only RedisLink imports this module, once a service has Redis configured.
"""

import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.exceptions import InvalidResponse, NoScriptError, RedisError, ResponseError

from mesh.config import RedisTlsConfig
from mesh.redis.commands import Command, RedisFailure, RedisRefusal, UnknownScript
from mesh.redis.server import RedisServer, tls_context

# Calls that are in flight at once; further ones wait for a connection.
_CONNECTIONS = 16


class RedisClient:
    """Calls of one event loop, each on a connection of a pool. There is no retry, and no timeout but for closing: the
    caller has both.
    """

    def __init__(self, server: RedisServer, closing_seconds: float) -> None:
        self._server = server
        tls: dict[str, Any] = {} if server.tls is None else {"connection_class": _TlsConnection, "tls": server.tls}
        pool = BlockingConnectionPool(
            max_connections=_CONNECTIONS,
            timeout=None,
            host=server.host,
            port=server.port,
            db=server.database,
            username=server.user,
            password=server.password,
            socket_timeout=None,
            socket_connect_timeout=closing_seconds,
            # RESP 2 and no driver's name: a user of the ACL needs no further commands to connect.
            protocol=2,
            driver_info=None,
            **tls,
        )
        self._redis = Redis.from_pool(pool)
        # Whether the last call was answered.
        self._answered = False

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Answers of commands that are sent in one round trip.

        Raises RedisRefusal for the first command that failed, and RedisFailure if there is no answer.
        """
        pipeline = self._redis.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            # redis-py would put the command, and thus a response's text, into the error that it raises.
            answers = await pipeline.execute(raise_on_error=False)
        # uvloop raises RuntimeError if the server ends the connection just before the commands are written.
        except (RedisError, OSError, RuntimeError) as error:
            raise self._failure(error) from error
        self._answered = True
        for answer in answers:
            if isinstance(answer, RedisError):
                raise self._failure(answer)
        return answers

    async def close(self) -> None:
        # The server may not answer the end of a TLS connection.
        with suppress(RedisError):
            await self._redis.aclose()

    def _failure(self, error: Exception) -> RedisFailure:
        # An answer with a known code may be a ConnectionError of redis-py, e.g. WRONGPASS.
        code = error.status_code if isinstance(error, RedisError) else None
        answered, self._answered = self._answered, code is not None or isinstance(error, ResponseError)
        if not self._answered:
            return RedisFailure(f"{self._server.name}{_reason(error, answered)}")
        kind = UnknownScript if isinstance(error, NoScriptError) else RedisRefusal
        user, words = self._server.user or "default", f"{code or ''} {error}".strip()
        return kind(f"{self._server.name} refuses a command of the user {user!r}: {words}")


class _TlsConnection(SSLConnection):
    """Reads its files at each connection, since certificates are renewed. A context that redis-py makes would trust the
    system's CAs in addition to the configured ones.
    """

    def __init__(self, *, tls: RedisTlsConfig, **options: Any) -> None:
        super().__init__(**options)
        self._tls = tls

    async def connect(self) -> None:
        if not self.is_connected:
            self.ssl_context.context = tls_context(self._tls)
        await super().connect()  # type: ignore[no-untyped-call]


def _reason(error: Exception, answered: bool) -> str:
    """Reason for a missing answer. answered: whether the call before got one."""
    cause = _system_error(error)
    if isinstance(error, InvalidResponse):
        return f": it does not speak Redis' protocol ({error})"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f" cannot be reached: its certificate is refused ({cause.verify_message})"
    if isinstance(cause, OSError) and not isinstance(cause, (ssl.SSLError, ConnectionResetError, BrokenPipeError)):
        return f" cannot be reached: {cause.strerror or cause}"
    why = "" if cause is None else f" ({_tls_reason(cause)})"
    if answered:
        return f": it ended the connection{why}"
    # With TLS 1.3 a server checks the client's certificate only after the client has begun to send.
    return f": it ended the connection before its first answer{why}: it may want TLS, or another certificate"


def _system_error(error: BaseException | None) -> OSError | None:
    """The error of the socket or of TLS from which redis-py made its own; None if the server just closed."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _tls_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        # E.g. TLSV13_ALERT_CERTIFICATE_REQUIRED.
        return f"TLS failed ({(error.reason or str(error)).lower().replace('_', ' ')})"
    return error.strerror or str(error)
