"""A source of tokens with nothing behind it: answers `Generate` with one ready-made message a token.

At a pace, every stream gets its token in the same instant, as an engine's step has it; without one, each stream is
written to as fast as its reader takes it. Messages are bytes made once, so that the source costs as little as gRPC
allows. `python -m bench.token_source PORT PACE_MS`, a pace of 0
being none.
"""

import argparse
import asyncio
import time
from typing import Any

import grpc
import uvloop
from deepmesh.v1 import gateway_pb2

SERVICE = "deepmesh.v1.GatewayService"
METHOD = "Generate"
TOKEN = gateway_pb2.GenerateResponse(delta=gateway_pb2.GenerateDelta(text="abc", token_count=1)).SerializeToString()


class Ticker:
    """Wakes everyone who waits, every `pace_s` seconds, without drifting."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._tick = asyncio.Event()

    async def wait(self) -> None:
        await self._tick.wait()

    async def run(self) -> None:
        due = time.perf_counter()
        while True:
            due += self._pace_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._tick.set()
            self._tick = asyncio.Event()


def raw_service(behavior: Any) -> grpc.GenericRpcHandler:
    """`Generate` with bytes in and bytes out."""
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_stream_rpc_method_handler(behavior)})


async def serve(port: int, behavior: Any) -> None:
    """A bare server, until its process ends."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([raw_service(behavior)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def _main(port: int, pace_ms: float) -> None:
    ticker = Ticker(pace_ms / 1000)

    async def paced(_request: bytes, context: Any) -> None:
        while True:
            await ticker.wait()
            await context.write(TOKEN)

    async def unpaced(_request: bytes, context: Any) -> None:
        while True:
            await context.write(TOKEN)

    ticking = asyncio.create_task(ticker.run()) if pace_ms else None
    await serve(port, paced if ticking else unpaced)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("pace_ms", type=float)
    arguments = parser.parse_args()
    uvloop.run(_main(arguments.port, arguments.pace_ms))
