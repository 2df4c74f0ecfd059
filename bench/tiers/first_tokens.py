"""The first token of a prompt whose prefix is known: by where the prefix lies."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table

from bench.tiers.rank import TierBackend, first_token, submit
from bench.tiers.stores import Way, store_ways
from engine.engine import Engine
from mesh.blocks import BLOCK_TOKENS, chain_hashes
from mesh.domain.targets import StoreTarget

# A prompt's tokens after its prefix, which are new every time.
ENDING_TOKENS = 32
# Bytes of stores' memory that all ways together wait for in a second; those that map it lock 1.6 GB/s ahead.
LOCKED_A_SECOND = 3e9
RECOMPUTED, POOL, HOST = "nowhere: computed again", "GPU pool", "host memory"


@dataclass(frozen=True)
class FirstTokens:
    """Medians, in seconds."""

    kv: str
    prefix_tokens: int
    # What the prefix's KV has.
    size_bytes: int
    bare_copy: float
    # By where the prefix lies.
    seconds: dict[str, float]

    def moving(self, place: str) -> float:
        """How much later the first token is than with the prefix in the pool."""
        return self.seconds[place] - self.seconds[POOL]


class PrefixBench:
    """One prompt at a time. The first round compiles kernels and page-locks memory, and is not counted."""

    def __init__(
        self, backend: TierBackend, lengths: Sequence[int], rounds: int, tell: Callable[[str], None] = print
    ) -> None:
        """lengths: of prefixes, in tokens, whole blocks each. tell: called with each time as it is measured."""
        assert all(length % BLOCK_TOKENS == 0 for length in lengths)
        self._backend = backend
        self._lengths = sorted(lengths, reverse=True)
        self._rounds = rounds
        self._tell = tell
        self._random = random.Random(0)
        self._keys = count()
        self._bare = _BareCopy(backend, self._lengths[0] // BLOCK_TOKENS)
        self._seconds: dict[tuple[int, str], list[float]] = {}

    async def measure(self, kv: str, directory: Path) -> list[FirstTokens]:
        """kv: the name of its number format; directory: on the disk that is measured."""
        longest = self._lengths[0] // BLOCK_TOKENS
        blocks = (self._rounds + 1) * sum(self._lengths) // BLOCK_TOKENS + longest
        memory = self._backend.kv_memory
        async with store_ways(memory, blocks, longest, directory) as ways:
            offered: dict[str, dict[int, list[list[int]]]] = {}
            for way in ways:
                if way.store_id not in offered:
                    offered[way.store_id] = await self._offer(way)
            if self._backend.state.device.type == "cuda":
                # Workers that map a store's memory lock its pages ahead of reads.
                await asyncio.sleep(len(ways) * blocks * self._backend.block_bytes / LOCKED_A_SECOND)
            for number in range(self._rounds + 1):
                for length in self._lengths:
                    self._note(number, length, "", self._bare.seconds(length // BLOCK_TOKENS))
                    await asyncio.to_thread(self._without_stores, number, length)
                    for way in ways:
                        # No worker has read its memory before.
                        prefix = offered[way.store_id][length][number]
                        way.take_events()
                        await asyncio.to_thread(self._from_store, number, way, prefix)
        return [self._result(kv, length) for length in self._lengths[::-1]]

    async def _offer(self, way: Way) -> dict[int, list[list[int]]]:
        """Give a store a prefix of each length for each round, which are returned, and one that pushes the others out
        of the memory of a store with a disk.
        """
        prefixes: dict[int, list[list[int]]] = {length: [] for length in self._lengths}
        stored = 0
        for length in (*self._lengths * (self._rounds + 1), self._lengths[0]):
            prefix = self._tokens(length)
            prefixes[length].append(prefix)
            chain = chain_hashes(prefix)
            # Which KV that is does not matter: the pool is filled with random values.
            await way.offer(chain, range(len(chain)))
            stored += len(chain)
            await way.until_on_disk(stored)
        return prefixes

    def _without_stores(self, number: int, length: int) -> None:
        prefix, engine = self._tokens(length), self._backend.engine()
        self._ask(number, RECOMPUTED, engine, prefix, cached=0)
        self._ask(number, POOL, engine, prefix, cached=length)
        engine = self._backend.engine(host=True)
        blocks = engine.pool.allocate(length // BLOCK_TOKENS)
        for block, content in zip(blocks, chain_hashes(prefix), strict=True):
            engine.pool.register(block, content)
        engine.pool.release(blocks)
        # Taking all blocks evicts these.
        engine.pool.release(engine.pool.allocate(engine.pool.free_blocks))
        self._ask(number, HOST, engine, prefix, cached=length)

    def _from_store(self, number: int, way: Way, prefix: list[int]) -> None:
        engine = self._backend.engine(agent=way.worker.agent)
        target = StoreTarget(way.store_id, len(prefix) // BLOCK_TOKENS)
        self._ask(number, way.name, engine, prefix, len(prefix), way.worker.wait, target)

    def _ask(
        self,
        number: int,
        place: str,
        engine: Engine,
        prefix: list[int],
        cached: int,
        wait: Any = time.sleep,
        fetch: StoreTarget | None = None,
    ) -> None:
        asked = submit(next(self._keys), [*prefix, *self._tokens(ENDING_TOKENS)], fetch=fetch)
        seconds, found = first_token(engine, asked, wait)
        assert found == cached, f"{place}: {found} of {cached} tokens were found"
        self._note(number, len(prefix), place, seconds)

    def _note(self, number: int, length: int, place: str, seconds: float) -> None:
        self._tell(f"round {number}, {length:,} tokens, {place or 'bare copy'}: {seconds * 1e3:.1f} ms")
        if number:
            self._seconds.setdefault((length, place), []).append(seconds)

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._backend.vocabulary_size), k=count)

    def _result(self, kv: str, length: int) -> FirstTokens:
        seconds = {place: median(each) for (own, place), each in self._seconds.items() if own == length}
        size_bytes = length // BLOCK_TOKENS * self._backend.block_bytes
        return FirstTokens(kv, length, size_bytes, seconds.pop(""), seconds)


class _BareCopy:
    """One copy of as many bytes as some blocks have, from page-locked memory to the GPU."""

    def __init__(self, backend: TierBackend, blocks: int) -> None:
        self._block_bytes = backend.block_bytes
        device = backend.state.device
        size_bytes = blocks * self._block_bytes
        self._source = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._target = torch.empty_like(self._source, device=device)

    def seconds(self, blocks: int) -> float:
        part = slice(blocks * self._block_bytes)
        _synchronize(self._target)
        began = time.perf_counter()
        self._target[part].copy_(self._source[part], non_blocking=True)
        _synchronize(self._target)
        return time.perf_counter() - began


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def first_tokens_table(rows: Sequence[FirstTokens], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("KV")
    for heading in ("prefix tokens", "MB", "bare copy ms"):
        table.add_column(heading, justify="right")
    table.add_column("the prefix lies in")
    for heading in ("first token ms", "of recomputing", "moving ms", "GB/s", "of bare copy"):
        table.add_column(heading, justify="right")
    for row in rows:
        about = [row.kv, f"{row.prefix_tokens:,}", f"{row.size_bytes / 1e6:,.0f}", f"{row.bare_copy * 1e3:.1f}"]
        for place, seconds in row.seconds.items():
            cells = [f"{seconds * 1e3:,.1f}", f"{seconds / row.seconds[RECOMPUTED]:.3f}"]
            moving = row.moving(place)
            if place not in (RECOMPUTED, POOL) and moving > 0:
                rate = row.size_bytes / moving / 1e9
                cells += [f"{moving * 1e3:,.1f}", f"{rate:.1f}", f"{row.bare_copy / moving:.2f}"]
            table.add_row(*about, place, *cells)
            about = [""] * len(about)
    return table
