"""Steps of requests that decode, while evicted blocks go to host memory and others are read back from there."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from rich.table import Table

from bench.rank.load import RankLoad
from bench.rank.steps import WARM_STEPS
from bench.tiers.rank import TierBackend, submit
from engine.engine import Engine
from engine.moves.host_tier import AHEAD_BLOCKS
from mesh.blocks import BLOCK_TOKENS, blocks_for
from mesh.domain.workers import HostTierStatus

# Blocks of a request's known prefix. It has one token more.
READ_BLOCKS = 32
# Steps from one such request to the next.
READ_STEPS = 4
_NOTHING = HostTierStatus(0, 0)


@dataclass(frozen=True)
class Steps:
    """seconds: of each step, with nothing moving and with it; GB/s: that moved meanwhile."""

    what: str
    host: bool
    quiet_ms: float
    ms: float
    longest_ms: float
    gb_per_second: float


@dataclass(frozen=True)
class DecodeLoad:
    requests: int
    context: int
    steps: int
    # How much lands in the pool, and evicts as much.
    gb_per_second: float

    @property
    def prefixes(self) -> int:
        """How many requests with known prefixes come in the timed steps."""
        return -(-self.steps // READ_STEPS)

    @property
    def tokens(self) -> int:
        """How many each request gets, at most."""
        return 4 * (self.steps + WARM_STEPS)

    @property
    def context_tokens(self) -> int:
        """The longest context of a request."""
        return max(self.context + self.tokens, READ_BLOCKS * BLOCK_TOKENS + 2)

    @property
    def host_blocks(self) -> int:
        """Blocks of host memory that the measurement needs."""
        return 2 * AHEAD_BLOCKS + (self.prefixes + 1) * READ_BLOCKS

    @property
    def pool_blocks(self) -> int:
        """The same of the pool. What lands takes turns in the blocks that no request needs."""
        decoding = self.requests * (blocks_for(self.context + self.tokens) + 1)
        return decoding + 4 * AHEAD_BLOCKS + (self.prefixes + 1) * (READ_BLOCKS + 1)


def measure_steps(backend: TierBackend, asked: DecodeLoad) -> list[Steps]:
    """Steps while requests come whose prefixes are known, and while KV lands in the pool: of an engine that keeps no
    evicted blocks, and of one that does. Only the latter has to read prefixes, and to write back what is evicted. To be
    called by each rank that leads a TP group.
    """
    return [row for host in (False, True) for row in _Run(backend, asked, host).measure()]


class _Run:
    def __init__(self, backend: TierBackend, asked: DecodeLoad, host: bool) -> None:
        self._backend = backend
        self._asked = asked
        self._host = host
        self._engine = backend.engine(host=host)
        self._load = RankLoad(self._engine, backend)
        self._key = 1 << 40

    def measure(self) -> list[Steps]:
        asked, load = self._asked, self._load
        prefixes = [load.prompt(READ_BLOCKS * BLOCK_TOKENS + 1) for _ in range(asked.prefixes + 1)]
        if self._host:
            for prefix in prefixes:
                load.pretend_cached(prefix)
            # Taking all blocks evicts these to host memory.
            self._engine.pool.release(self._engine.pool.allocate(self._engine.pool.free_blocks))
        load.start_decoding(asked.requests, asked.context, asked.tokens)
        load.decode_seconds(WARM_STEPS)
        quiet = load.decode_seconds(asked.steps)
        # The first of them compiles.
        self._ask(prefixes.pop())
        load.decode_seconds(WARM_STEPS, lambda step: self._engine.poll_transfers())
        known = len(prefixes) * READ_BLOCKS
        found = self._timed("prefixes are found", quiet, self._asks(prefixes), known)
        # What is evicted from now on is not in host memory yet, as the prefixes are that were read.
        load.land(self._engine.pool.free_blocks)
        # The tier copies no more in a step before it must.
        blocks = min(round(asked.gb_per_second * 1e9 * mean(quiet) / self._backend.block_bytes), AHEAD_BLOCKS)
        load.decode_seconds(WARM_STEPS, lambda step: load.land(blocks))
        lands = self._timed("KV lands", quiet, lambda step: load.land(blocks), blocks * asked.steps)
        self._engine.stop()
        while not self._engine.stopped:
            self._engine.step()
        return [found, lands]

    def _asks(self, prefixes: list[list[int]]) -> Callable[[int], None]:
        def before(step: int) -> None:
            if step % READ_STEPS == 0 and prefixes:
                self._ask(prefixes.pop())
            self._engine.poll_transfers()

        return before

    def _ask(self, prefix: list[int]) -> None:
        if not self._host:
            self._load.pretend_cached(prefix)
        self._key += 1
        self._engine.submit(submit(self._key, prefix))

    def _timed(self, what: str, quiet: Sequence[float], before: Callable[[int], None], moved_blocks: int) -> Steps:
        """moved_blocks: how many a tier has to write or to read."""
        at_first, began = _tier(self._engine), time.perf_counter()
        seconds = self._load.decode_seconds(self._asked.steps, before)
        elapsed, after = time.perf_counter() - began, _tier(self._engine)
        moved = after.written_blocks + after.read_blocks - at_first.written_blocks - at_first.read_blocks
        if self._host:
            assert moved >= moved_blocks // 2, f"{what}: {moved} of {moved_blocks} blocks moved"
        rate = moved * self._backend.block_bytes / elapsed / 1e9
        return Steps(what, self._host, mean(quiet) * 1e3, mean(seconds) * 1e3, max(seconds) * 1e3, rate)


def _tier(engine: Engine) -> HostTierStatus:
    return engine.load().host_tier or _NOTHING


def steps_table(rows: Sequence[Steps], asked: DecodeLoad, title: str) -> Table:
    table = Table(title=f"{title}: {asked.requests} requests decode", title_justify="left")
    table.add_column("meanwhile")
    table.add_column("host memory")
    for heading in ("quiet ms", "ms a step", "longest ms", "moved GB/s", "for without it"):
        table.add_column(heading, justify="right")
    without = {row.what: row.ms for row in rows if not row.host}
    for row in sorted(rows, key=lambda row: (list(without).index(row.what), row.host)):
        cells = [f"{value:.2f}" for value in (row.quiet_ms, row.ms, row.longest_ms)]
        ratio = f"{row.ms / without[row.what] - 1:+.1%}"
        table.add_row(row.what, "yes" if row.host else "no", *cells, f"{row.gb_per_second:.1f}", ratio)
    return table
