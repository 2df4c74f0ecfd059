"""Looking up a chain of blocks in the KV-cache center: by a worker, over UCX and over gRPC.

    python -m bench.kv_store.lookup [--lookups 5000]

The worker and the store are two processes. Over UCX a lookup brings the blocks themselves: here they have 64 bytes, so
that what is compared is the lookup. Over gRPC it is MatchPrefix, on an event loop as services have it. Both are timed
where the caller waits, and take turns; medians are compared.
"""

import argparse
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

from bench.kv_store.worker import KvWorker, attached, offer_all, store_process
from mesh.channel import Channels
from mesh.domain import worker_wire

CHAIN_BLOCKS = 64
HASH_BYTES = 16
BLOCK_BYTES = 64
WARM_LOOKUPS = 200

Chain = Sequence[bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookups", type=int, default=5000)
    arguments = parser.parse_args()
    Console().print(uvloop.run(worker_lookups(arguments.lookups)))


async def timed(call: Callable[[Any], Awaitable[object]], questions: Iterable[Any]) -> list[float]:
    """Seconds of each call, one after another."""
    seconds = []
    for question in questions:
        began = time.perf_counter()
        await call(question)
        seconds.append(time.perf_counter() - began)
    return seconds


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
