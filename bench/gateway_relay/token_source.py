"""A source of tokens with nothing behind it: answers `Generate` with one ready-made message a token.

    python -m bench.gateway_relay.token_source PORT PACE_MS

At a pace, every stream gets its token in the same instant, as in a step of an engine, and the text of that token is
the instant (time.perf_counter, one clock for all processes). At pace 0 each stream is written to as fast as its reader
takes it. A message is made once for all streams, so that the source costs as little as gRPC allows.
"""

import argparse
import asyncio
import itertools
import time
from typing import Any

import grpc
import uvloop
from deepmesh.v1 import gateway_pb2

SERVICE = "deepmesh.v1.GatewayService"
METHOD = "Generate"
# Clients of the mesh ping their servers more often than gRPC's servers allow by default.
PING_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 1_000), ("grpc.keepalive_permit_without_calls", 1))


# Until no stream has begun for SETTLE_SECONDS, a source pauses between its messages.
SETTLE_SECONDS = 1.0
PAUSE_SECONDS = 0.5


class Settling:
    """Lets all streams begin before a source saturates its readers: a saturated grpc.aio server accepts only one call
    in each turn of its loop.
    """

    def __init__(self) -> None:
        self._until = 0.0

    def begun(self) -> None:
        """Note that a stream begins."""
        self._until = time.monotonic() + SETTLE_SECONDS

    async def pause(self) -> None:
        if time.monotonic() < self._until:
            await asyncio.sleep(PAUSE_SECONDS)


def token_message(text: str) -> bytes:
    delta = gateway_pb2.GenerateDelta(text=text, token_count=1)
    return gateway_pb2.GenerateResponse(delta=delta).SerializeToString()


class Ticker:
    """Makes a message every `pace_s` seconds, without drifting, the same for everyone."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._messages: list[bytes] = []
        self._tick: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def made(self) -> int:
        return len(self._messages)

    async def message(self, number: int) -> bytes:
        """Message `number`, once it is made. A late stream gets the messages it missed, since tokens are matched with
        steps by counting them.
        """
        while number >= self.made:
            await asyncio.shield(self._tick)
        return self._messages[number]

    async def run(self) -> None:
        due = time.perf_counter()
        while True:
            due += self._pace_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tick, self._tick = self._tick, asyncio.get_running_loop().create_future()
            self._messages.append(token_message(repr(time.perf_counter())))
            tick.set_result(None)


def raw_service(behavior: Any) -> grpc.GenericRpcHandler:
    """`Generate` with bytes in and bytes out."""
    return grpc.method_handlers_generic_handler(SERVICE, {METHOD: grpc.unary_stream_rpc_method_handler(behavior)})


async def serve(port: int, behavior: Any) -> None:
    """Run a bare server until its process ends."""
    server = grpc.aio.server(options=PING_OPTIONS)
    server.add_generic_rpc_handlers([raw_service(behavior)])
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


async def serve_tokens(port: int, pace_ms: float) -> None:
    ticker = Ticker(pace_ms / 1000)
    message = token_message("abc")

    async def paced(_request: bytes, context: Any) -> None:
        for number in itertools.count(ticker.made):
            await context.write(await ticker.message(number))

    settling = Settling()

    async def unpaced(_request: bytes, context: Any) -> None:
        settling.begun()
        while True:
            await settling.pause()
            await context.write(message)

    ticking = asyncio.create_task(ticker.run()) if pace_ms else None
    await serve(port, paced if ticking else unpaced)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("pace_ms", type=float)
    arguments = parser.parse_args()
    uvloop.run(serve_tokens(arguments.port, arguments.pace_ms))
