"""Steps of DeepSeek-R1's first layers while some experts are chosen more often than others, on the GPUs of one host.

`python -m bench.node.balance [--layers N] [--experts w4a8|fp8] [--kv fp8|bf16] [--rows 64 256] [--step-tokens N]
[--zipf EXPONENT] [--redundant N] [--interval STEPS] [--moving-steps N]`

The bench runs the serving engine, one rank a GPU (dp, ep), over random weights. Tokens draw their experts by Zipf's
law, without expert groups. The first ranks' experts are the most popular, so that the imbalance ((largest - mean) /
mean) is at most 1 with two ranks and 3 with four. "uniform" and "skewed" leave experts where they are; "counted" is
uniform with the default engine.balance; "balanced" has the same skew after engine.balance has moved experts. Decode
steps have contexts of 3,500 tokens, and prompts are as long. Experts move while the first of --rows decode. The second
table shows what that costs, and as many such steps in which none may move.
"""

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table

from bench.exchange.processes import on_each_gpu
from bench.node.engines import RankEngine
from bench.node.skew import SkewedLogits, zipf
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.steps import CONTEXT, WARM_STEPS
from capacity.shapes import SHAPES
from engine.balance.config import BalanceConfig
from engine.balance.report import BalanceReport
from engine.config import EngineConfig
from engine.exchange.peer import PeerExchange
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.settings.device import Hardware, ResolvedEngineConfig, resolve
from mesh.blocks import BLOCK_TOKENS

ResultT = TypeVar("ResultT")
SHAPE = "r1-one-group"
WAYS = ("uniform", "counted", "skewed", "balanced")
STEPS = 30
# How many full steps of prompts are measured.
PREFILL_STEPS = 4
# Experts move if that lowers a layer's imbalance by so much.
THRESHOLD = 0.02


@dataclass(frozen=True)
class Options:
    ranks: int
    model: MeasuredModel
    rows: tuple[int, ...]
    step_tokens: int
    zipf: float
    balance: BalanceConfig
    # Decode steps during which experts may move.
    moving_steps: int


@dataclass(frozen=True)
class Times:
    """Seconds of a decode step by its number of rows a rank, and of all prompts."""

    decode: dict[int, float]
    prefill: float


@dataclass(frozen=True)
class Moving:
    """Consecutive steps, during some of which experts moved: the seconds of each and the report after each."""

    seconds: list[float]
    reports: list[BalanceReport | None]

    @property
    def moved(self) -> list[int]:
        """How many slots had been given another expert by the end of each step."""
        return [0 if report is None else report.moved for report in self.reports]

    @property
    def window(self) -> range:
        """The steps from the first move to the last."""
        changes = [index for index, (one, other) in enumerate(pairwise(self.moved), 1) if other > one]
        return range(changes[0], changes[-1] + 1) if changes else range(0)


def measure(options: Options, exchange: PeerExchange) -> tuple[dict[str, Times], Moving, Moving]:
    """Run by all ranks at once. Returns times by way, steps in which no expert may move, and steps in which some may.

    The steps are those of the first of `options.rows`.
    """
    torch.manual_seed(exchange.place.rank)
    popularity = zipf(SHAPES[SHAPE]["n_routed_experts"], options.zipf)
    times = {}

    def unmoved(engine: RankEngine, logits: SkewedLogits) -> Moving:
        times["uniform"] = _times(engine, options)
        logits.set_popularity(popularity)
        times["skewed"] = _times(engine, options)
        return move_experts(engine, options.rows[0], options.moving_steps)

    def counted(engine: RankEngine, _: SkewedLogits) -> None:
        times["counted"] = _times(engine, options)

    def moved(engine: RankEngine, logits: SkewedLogits) -> Moving:
        logits.set_popularity(popularity)
        moving = move_experts(engine, options.rows[0], options.moving_steps)
        times["balanced"] = _times(engine, options)
        return moving

    still = _with_engine(options, exchange, BalanceConfig(interval_steps=None), unmoved)
    _with_engine(options, exchange, BalanceConfig(), counted)
    return times, still, _with_engine(options, exchange, options.balance, moved)


def _with_engine(
    options: Options,
    exchange: PeerExchange,
    balance: BalanceConfig,
    act: Callable[[RankEngine, SkewedLogits], ResultT],
) -> ResultT:
    with tempfile.TemporaryDirectory() as scratch:
        resolved = _resolved(options, Path(scratch), balance)
        shape = SHAPES[SHAPE]
        mixtures = options.model.layers - shape["first_k_dense_replace"]
        logits = SkewedLogits(mixtures, shape["n_routed_experts"], torch.device("cuda"))
        engine = RankEngine(resolved, make_rank(resolved, exchange, lambda _: logits), exchange, exchange.peers)
    # As serving ranks do: the garbage collector need not visit what was loaded.
    gc.freeze()
    result = act(engine, logits)
    engine.stop()
    # Free the engine's weights and KV.
    del engine
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _resolved(options: Options, directory: Path, balance: BalanceConfig) -> ResolvedEngineConfig:
    most = max(options.rows)
    context = CONTEXT + WARM_STEPS + options.moving_steps + BLOCK_TOKENS
    config = EngineConfig(
        **options.model.settings(directory),
        max_requests=most,
        graph_rows=tuple(options.rows),
        max_step_tokens=options.step_tokens,
        context_tokens=context,
        # No step is run to find out.
        total_blocks=most * -(-context // BLOCK_TOKENS),
        parallel=ParallelConfig(tp=1, dp=options.ranks),
        balance=balance,
        # The bench runs each kind of step once before it measures.
        warm_up="off",
        # Page-locking would go on while the first steps are timed.
        host_blocks=0,
    )
    return resolve(config, Hardware(torch.cuda.device_count(), 0))


def _times(engine: RankEngine, options: Options) -> Times:
    prompts = PREFILL_STEPS * options.step_tokens // CONTEXT
    engine.load.prefill_seconds(prompts, CONTEXT)
    decode = {rows: median(_decode_seconds(engine, rows, STEPS)) for rows in options.rows}
    return Times(decode, engine.load.prefill_seconds(prompts, CONTEXT) / (prompts * CONTEXT))


def _decode_seconds(engine: RankEngine, rows: int, steps: int) -> list[float]:
    load = engine.load
    load.start_decoding(rows, CONTEXT, WARM_STEPS + steps + 4)
    load.decode_seconds(WARM_STEPS)
    seconds = load.decode_seconds(steps)
    load.drain()
    return seconds


def move_experts(engine: RankEngine, rows: int, steps: int) -> Moving:
    """Run decode steps in which experts may move. All ranks call it at once and take the same number of steps."""
    load = engine.load
    load.start_decoding(rows, CONTEXT, WARM_STEPS + steps + 4)
    load.decode_seconds(WARM_STEPS)
    moving = Moving([], [])
    for _ in range(steps):
        moving.seconds.extend(load.decode_seconds(1))
        moving.reports.append(engine.backend.balance)
    load.drain()
    return moving


def table(options: Options, times: dict[str, Times], imbalances: dict[str, str]) -> Table:
    title = f"{options.model.title}, Zipf {options.zipf:g}, {options.ranks}"
    shown = Table(title=f"{title} ranks")
    for column in ("", "imbalance", *(f"{rows} rows, ms" for rows in options.rows), "prompts, tokens/s a rank"):
        shown.add_column(column, justify="right")
    uniform = times["uniform"]
    for way in WAYS:
        each = times[way]
        cells = [
            f"{each.decode[rows] * 1000:.3f} ({each.decode[rows] / uniform.decode[rows]:.3f})" for rows in options.rows
        ]
        cells.append(f"{1 / each.prefill:,.0f} ({each.prefill / uniform.prefill:.3f})")
        shown.add_row(way, imbalances[way], *cells)
    shown.caption = "in brackets: times as long as with uniform routing"
    return shown


def moving_table(options: Options, still: Moving, moving: Moving) -> Table:
    window = moving.window
    parts = {
        "none may move": still.seconds,
        "before": moving.seconds[: window.start],
        "while experts move": moving.seconds[window.start : window.stop],
        "after": moving.seconds[window.stop :],
    }
    shown = Table(title=f"decode steps of {options.rows[0]} rows a rank, {moving.moved[-1]} slots get another expert")
    for column in ("", "steps", "mean ms", "median ms", "longest ms", "longest / median"):
        shown.add_column(column, justify="right")
    for name, seconds in parts.items():
        if seconds:
            numbers = mean(seconds) * 1000, median(seconds) * 1000, max(seconds) * 1000, max(seconds) / median(seconds)
            shown.add_row(name, str(len(seconds)), *(f"{number:.3f}" for number in numbers))
    return shown


def imbalances_of(moving: Moving) -> dict[str, str]:
    """By way, the mean (and largest) imbalance over the layers, from the first report for "skewed" and from the last
    one for "balanced".
    """
    looks = [report for report in moving.reports if report is not None]
    if not looks:
        return dict.fromkeys(WAYS, "")
    said = [f"{each.mean_imbalance:.3f} ({each.largest_imbalance:.3f})" for each in (looks[0], looks[-1])]
    return {"uniform": "", "counted": "", "skewed": said[0], "balanced": said[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--experts", choices=("w4a8", "fp8"), default="w4a8")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--redundant", type=int, default=2)
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--moving-steps", type=int, default=800)
    arguments = parser.parse_args()
    ranks = torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"there are {ranks} CUDA devices here")
    balance = BalanceConfig(interval_steps=arguments.interval, redundant=arguments.redundant, threshold=THRESHOLD)
    model = MeasuredModel(SHAPE, arguments.layers, arguments.experts, arguments.kv)
    steps = tuple(arguments.rows), arguments.step_tokens
    options = Options(ranks, model, *steps, arguments.zipf, balance, arguments.moving_steps)
    times, still, moving = on_each_gpu(Layout(dp=ranks, ep=ranks), partial(measure, options))[0]
    console = Console(width=150)
    console.print(table(options, times, imbalances_of(moving)))
    console.print(moving_table(options, still, moving))
    console.print(torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
