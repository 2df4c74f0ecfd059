"""A server that speaks Redis' protocol and gives the answers that a test sets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import hiredis

from mesh.redis.commands import Command


@dataclass
class AnsweringRedis:
    """`commands` gets the commands that arrive. `answer` sends bytes of the protocol on the newest connection."""

    port: int = 0
    connections: int = 0
    commands: "asyncio.Queue[Command]" = field(default_factory=asyncio.Queue)
    # The answer to every command; None leaves answers to the test.
    always: bytes | None = None
    _writer: asyncio.StreamWriter | None = None

    def answer(self, answer: bytes) -> None:
        assert self._writer is not None
        self._writer.write(answer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer, parser = writer, hiredis.Reader()
        self.connections += 1
        while data := await reader.read(1 << 16):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                self.commands.put_nowait(tuple(command))
                if self.always is not None:
                    writer.write(self.always)


@asynccontextmanager
async def answering_redis(always: bytes | None = None) -> AsyncIterator[AnsweringRedis]:
    redis = AnsweringRedis(always=always)
    async with await asyncio.start_server(redis._serve, "127.0.0.1", 0) as server:
        redis.port = server.sockets[0].getsockname()[1]
        yield redis
