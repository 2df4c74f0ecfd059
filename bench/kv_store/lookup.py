"""Looking up a chain of blocks in the KV-cache center: by a worker, over UCX and over gRPC.

    python -m bench.kv_store.lookup [--lookups 5000]

The worker and the store are two processes. Over UCX a lookup is answered at once and then brings the blocks themselves,
here of 64 bytes. Over gRPC it is MatchPrefix, on an event loop as services have one, and brings no blocks. Both are
timed where the caller waits, and take turns; medians are compared. For known blocks the table also has the wait for the
answer alone, without the time from the answer to the last block. The processor time of both processes says what a
lookup costs on a busy machine, where a process that sleeps has to wait for a processor.
"""

import argparse
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import uvloop
from deepmesh.internal.v1 import kvstore_pb2, kvstore_pb2_grpc
from rich.console import Console
from rich.table import Table

from bench.kv_store.worker import KvWorker, attached, offer_all, store_process
from mesh.domain import worker_wire
from mesh.rpc.channel import Channels

CHAIN_BLOCKS = 64
HASH_BYTES = 16
BLOCK_BYTES = 64
# Lookups between two readings of the processes' times, whose clock ticks only every 10 ms.
BATCH = 500

Chain = Sequence[bytes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookups", type=int, default=5000)
    arguments = parser.parse_args()
    Console(width=120).print(uvloop.run(worker_lookups(arguments.lookups)))


async def timed(call: Callable[[Any], Awaitable[object]], questions: Iterable[Any]) -> list[float]:
    """Seconds of each call, one after another."""
    seconds = []
    for question in questions:
        began = time.perf_counter()
        await call(question)
        seconds.append(time.perf_counter() - began)
    return seconds


@dataclass
class Measured:
    """Seconds of each lookup, and the processor time that both processes together take for one."""

    seconds: list[float] = field(default_factory=list)
    # Over UCX: seconds until the answer, without the blocks.
    answered: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


async def worker_lookups(lookups: int) -> Table:
    """A worker's lookups at a real store, over UCX and over gRPC in turn."""
    worker = KvWorker(layers=1, blocks=CHAIN_BLOCKS, piece_bytes=BLOCK_BYTES)
    known = [secrets.token_bytes(HASH_BYTES) for _ in range(CHAIN_BLOCKS)]
    unknown = [secrets.token_bytes(HASH_BYTES) for _ in range(CHAIN_BLOCKS)]
    worker.hold(known, range(CHAIN_BLOCKS))
    async with store_process({"memory_bytes": 1 << 20}) as endpoint, Channels().open(endpoint) as channel:
        (store,) = psutil.Process().children()
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        async with attached(worker, [endpoint]) as client:
            await offer_all(worker, client, stub, known)
            rows = Table(title=f"A worker's lookup of {CHAIN_BLOCKS} blocks at a store, us", title_justify="left")
            headings = ("known", "UCX p50", "p99", "processor", "gRPC p50", "p99", "processor")
            for heading in (*headings, "UCX is faster", "and takes less"):
                rows.add_column(heading, justify="right")
            for chain in (unknown, known):
                ucx, grpc = await compared(worker, client.attached[0], stub, store, chain, lookups)
                less = f"{statistics.median(grpc.processor) / statistics.median(ucx.processor):.1f} times"
                if chain is known:
                    answer = quantiles(ucx.answered)
                    rows.add_row("all, answer", *answer, "", *figures(grpc), faster(ucx.answered, grpc.seconds), "")
                name = "all, with blocks" if chain is known else "none"
                rows.add_row(name, *figures(ucx), *figures(grpc), faster(ucx.seconds, grpc.seconds), less)
    worker.agent.close()
    return rows


async def compared(
    worker: KvWorker,
    store_id: str,
    stub: kvstore_pb2_grpc.KvStoreServiceStub,
    store: psutil.Process,
    chain: Chain,
    lookups: int,
) -> tuple[Measured, Measured]:
    """Lookups over UCX and over gRPC, in batches that take turns; the first batch of each is not counted."""
    request = kvstore_pb2.MatchPrefixRequest(
        kv_namespace=worker_wire.namespace_message(worker.namespace), block_hashes=chain
    )

    over_ucx, over_grpc = Measured(), Measured()

    async def fetch(chain: Chain) -> None:
        began = time.perf_counter()
        fetched = worker.fetch(store_id, chain, range(CHAIN_BLOCKS))
        assert fetched.error is None and fetched.answered_seconds is not None
        over_ucx.answered.append(time.perf_counter() - began - fetched.seconds + fetched.answered_seconds)

    for batch in range(1 + -(-lookups // BATCH)):
        for call, question, measured in ((fetch, chain, over_ucx), (stub.MatchPrefix, request, over_grpc)):
            before = processor_seconds(store)
            seconds = await timed(call, [question] * BATCH)
            if batch:
                measured.seconds += seconds
                measured.processor.append((processor_seconds(store) - before) / BATCH)
        if not batch:
            over_ucx.answered.clear()
    return over_ucx, over_grpc


def processor_seconds(store: psutil.Process) -> float:
    """Processor time of this process and the store's, in seconds."""
    times = store.cpu_times()
    return time.process_time() + times.user + times.system


def faster(seconds: Sequence[float], than: Sequence[float]) -> str:
    return f"{statistics.median(than) / statistics.median(seconds):.1f} times"


def figures(measured: Measured) -> list[str]:
    return [*quantiles(measured.seconds), f"{statistics.median(measured.processor) * 1e6:.0f}"]


def quantiles(seconds: Sequence[float]) -> list[str]:
    """The median and the 99th percentile, in microseconds."""
    return [f"{value * 1e6:.0f}" for value in np.quantile(seconds, (0.5, 0.99))]


if __name__ == "__main__":
    main()
