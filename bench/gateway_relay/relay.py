"""The least that can stand between a client and a source of tokens in grpc.aio: one upstream stream for each stream of
a client, with every message forwarded unchanged and unparsed.

    python -m bench.gateway_relay.relay PORT UPSTREAM
"""

import argparse
from typing import Any

import grpc
import uvloop

from bench.gateway_relay.token_source import METHOD, SERVICE, serve


async def serve_relay(port: int, upstream: str) -> None:
    channel = grpc.aio.insecure_channel(upstream, options=[("grpc.enable_http_proxy", 0)])
    generate: Any = channel.unary_stream(f"/{SERVICE}/{METHOD}")

    async def forward(request: bytes, context: Any) -> None:
        call = generate(request)
        while (message := await call.read()) is not grpc.aio.EOF:
            await context.write(message)

    await serve(port, forward)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("upstream")
    arguments = parser.parse_args()
    uvloop.run(serve_relay(arguments.port, arguments.upstream))
