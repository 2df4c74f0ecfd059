"""One connection to Redis, shared by all callers: commands are sent at once, and answers come in the same order.

redis-py gives each concurrent command its own connection, lock and timers, and takes two to six times as long for a
lookup of the KV stores. hiredis does the parsing.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import hiredis

from mesh.redis_commands import Command
from mesh.redis_server import RedisServer


class RedisFailure(Exception):
    """Redis did not answer."""


class RedisRefusal(RedisFailure):
    """Redis answered with an error."""

    def __init__(self, message: str, is_unknown_script: bool) -> None:
        super().__init__(message)
        self.is_unknown_script = is_unknown_script


class RedisConnection:
    """Connects at the first call, and again after a loss. Used by one event loop."""

    def __init__(self, server: RedisServer, timeout_seconds: float) -> None:
        self._server = server
        self._timeout_seconds = timeout_seconds
        self._stream: _Stream | None = None
        self._connecting: asyncio.Task[_Stream] | None = None

    async def call(self, commands: Sequence[Command]) -> list[Any]:
        """Answers of commands that are sent in one round trip.

        Raises RedisRefusal for the first command that failed, and RedisFailure if there is no answer in time.
        """
        stream = self._stream
        if stream is not None and not stream.lost:
            return await self._answers(stream, commands)
        # The timeout covers both connecting and the answer.
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await self._answers(await self._connected(), commands)
        except TimeoutError:
            raise RedisFailure(f"{self._server.name}: no answer in time") from None

    async def _answers(self, stream: "_Stream", commands: Sequence[Command]) -> list[Any]:
        return [self._checked(answer) for answer in await stream.send(commands)]

    def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._stream is not None:
            self._stream.end("it was closed")

    async def _connected(self) -> "_Stream":
        """Concurrent callers wait for the same attempt, which continues if one of them is cancelled."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._connection_ended)
        return await asyncio.shield(self._connecting)

    def _connection_ended(self, connecting: "asyncio.Task[_Stream]") -> None:
        self._connecting = None
        # Failures were raised to the callers. A connection may succeed after all of them have left, so keep it here.
        if not connecting.cancelled() and connecting.exception() is None:
            self._stream = connecting.result()

    async def _connect(self) -> "_Stream":
        server, loop = self._server, asyncio.get_running_loop()
        stream = None
        try:
            async with asyncio.timeout(self._timeout_seconds):
                context = server.context()
                _, stream = await loop.create_connection(
                    lambda: _Stream(server.name, self._timeout_seconds), server.host, server.port, ssl=context
                )
                await self._log_in(stream)
        except BaseException as error:
            if stream is not None:
                stream.end("it was not used")
            if isinstance(error, OSError):
                raise RedisFailure(f"{server.name} cannot be reached: {_reason(error)}") from error
            raise
        return stream

    async def _log_in(self, stream: "_Stream") -> None:
        commands: list[Command] = [self._server.login] if self._server.login else []
        if self._server.database:
            commands.append((b"SELECT", str(self._server.database).encode()))
        for command in commands:
            await self._answers(stream, [command])

    def _checked(self, answer: Any) -> Any:
        if isinstance(answer, hiredis.ReplyError):
            user = self._server.user or "default"
            message = f"{self._server.name} refuses a command of the user {user!r}: {answer}"
            raise RedisRefusal(message, str(answer).startswith("NOSCRIPT"))
        return answer


@dataclass(slots=True)
class _Awaited:
    """A caller that waits for the answers of its commands."""

    late_at: float
    commands: int
    future: asyncio.Future[list[Any]]
    answers: list[Any] = field(default_factory=list)


class _Stream(asyncio.Protocol):
    """The bytes of one connection. A late answer ends the connection, since all answers after it are late too."""

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self.lost = False
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader()
        # In the order of their commands.
        self._awaited: deque[_Awaited] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._answered = False

    def send(self, commands: Sequence[Command]) -> asyncio.Future[list[Any]]:
        """Each answer becomes a value or a hiredis.ReplyError. The future gets RedisFailure if an answer does not come.

        Commands sent in one turn of the event loop leave in one write.
        """
        assert commands
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        if self.lost or self._transport is None:
            _fail(future, f"{self._name} has ended the connection")
            return future
        self._awaited.append(_Awaited(self._loop.time() + self._timeout_seconds, len(commands), future))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_seconds, self._look)
        self._transport.write(b"".join(map(_packed, commands)))
        return future

    def end(self, why: str) -> None:
        """Fail all callers that wait for an answer."""
        self.lost = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._transport is not None:
            self._transport.abort()
        while self._awaited:
            future = self._awaited.popleft().future
            if not future.done():
                _fail(future, f"{self._name}: {why}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not False:
                if not self._awaited:
                    raise hiredis.ProtocolError("an answer that nobody asked for")
                self._answered = True
                first = self._awaited[0]
                first.answers.append(answer)
                if len(first.answers) == first.commands:
                    self._awaited.popleft()
                    if not first.future.done():
                        first.future.set_result(first.answers)
        except hiredis.ProtocolError as error:
            self.end(f"it does not speak Redis' protocol ({error})")

    def connection_lost(self, error: Exception | None) -> None:
        why = "" if error is None else f" ({_reason(error)})"
        if self._answered:
            self.end(f"it ended the connection{why}")
        else:
            # With TLS 1.3 a server checks the client's certificate only after the client has begun to send.
            self.end(f"it ended the connection before its first answer{why}: it may want TLS, or another certificate")

    def _look(self) -> None:
        self._watch = None
        if not self._awaited:
            return
        late_at = self._awaited[0].late_at
        if late_at <= self._loop.time():
            self.end("it did not answer in time")
        else:
            self._watch = self._loop.call_at(late_at, self._look)


def _packed(command: Command) -> bytes:
    # The type stubs accept only commands of one word.
    return command if isinstance(command, bytes) else hiredis.pack_command(command)  # type: ignore[arg-type]


def _fail(future: asyncio.Future[Any], message: str) -> None:
    future.set_exception(RedisFailure(message))
    # Mark the exception as retrieved: the caller may already have failed with another answer's error.
    future.exception()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        # E.g. TLSV13_ALERT_CERTIFICATE_REQUIRED.
        return f"TLS failed ({(error.reason or str(error)).lower().replace('_', ' ')})"
    return getattr(error, "strerror", None) or str(error)
