"""The same lookup over gRPC: one unary call with the chain's hashes, answered with the length of the match."""

import asyncio
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import uvloop

from transfer.fetch.lookup_server import Found

_METHOD = "/bench.Store/Match"
_OPTIONS = [("grpc.enable_http_proxy", 0)]
HASH_BYTES = 16


class ShortMemory:
    """A store's `LookupHandler` that knows no block, so that only the way there and back takes time."""

    def match(self, session_id: int, sequence: int, hashes: Sequence[bytes]) -> Found:
        return Found([], 0)

    def release(self, session_id: int, sequence: int, blocks: Sequence[int]) -> None:
        assert not blocks


class GrpcStore:
    """Serves lookups from a thread with an event loop of its own, as the store's service process does."""

    def __init__(self) -> None:
        self.port = 0
        self._started = threading.Event()
        threading.Thread(target=uvloop.run, args=(self._serve(),), daemon=True).start()
        self._started.wait()

    async def _serve(self) -> None:
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((_Handler(ShortMemory()),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._started.set()
        await server.wait_for_termination()


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, store: ShortMemory) -> None:
        self._store = store

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self._match) if handler_call_details.method == _METHOD else None

    async def _match(self, request: bytes, context: Any) -> bytes:
        hashes = [request[start : start + HASH_BYTES] for start in range(0, len(request), HASH_BYTES)]
        return struct.pack("<I", len(self._store.match(0, 0, hashes).blocks))


class GrpcLookups:
    """A client that looks up one chain again and again, on an event loop that runs only during a lookup."""

    def __init__(self, port: int, hashes: Sequence[bytes]) -> None:
        self._port = port
        self._request = b"".join(hashes)
        self._loop = uvloop.new_event_loop()

    def __enter__(self) -> "GrpcLookups":
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open())
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.run_until_complete(self._channel.close())
        self._loop.close()

    def look_up(self) -> float:
        """Seconds of one lookup."""
        return self._loop.run_until_complete(self._look_up())

    async def _open(self) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._port}", options=_OPTIONS)
        self._call: Any = self._channel.unary_unary(_METHOD)

    async def _look_up(self) -> float:
        began = time.perf_counter()
        await self._call(self._request)
        return time.perf_counter() - began
