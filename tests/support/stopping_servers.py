"""Started by a test: servers that stop while a call ends, again and again."""

import asyncio
import sys
from typing import Any

from mesh.config import ServerConfig
from mesh.rpc import server as module
from mesh.rpc.channel import Channels
from mesh.rpc.server import MeshServer
from tests.support.raw_service import raw_method, raw_registration

# The call's end takes about a millisecond: the time to flush is over before, with and after it.
LONGEST_FLUSH_SECONDS = 0.003


async def stop_one(flush_seconds: float) -> None:
    module.FLUSH_SECONDS = flush_seconds
    started = asyncio.Event()

    async def forever(request: bytes, context: Any) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    server = MeshServer(ServerConfig(drain_seconds=0), "test", [raw_registration(unary_unary=forever)])
    await server.__aenter__()
    async with Channels().open(server.endpoint) as channel:
        call = asyncio.ensure_future(raw_method(channel, "unary_unary")(b""))
        await started.wait()
        await server.__aexit__(None, None, None)
        await asyncio.gather(call, return_exceptions=True)


async def stop_all(servers: int) -> None:
    for number in range(servers):
        await stop_one(LONGEST_FLUSH_SECONDS * number / servers)


if __name__ == "__main__":
    asyncio.run(stop_all(int(sys.argv[1])))
