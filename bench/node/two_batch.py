"""Steps of DeepSeek-R1's layers on the GPUs of one host: whole, in two micro-batches, and without any exchange.

`python -m bench.node.two_batch [--tp N] [--dp N] [--ep N] [--layers N] [--experts w4a8|fp8] [--kv fp8|bf16]
[--rows 32 64 128 256] [--prompts 1024 4096 16384] [--repeats N]`

The bench runs the serving engine's layers, in one process a GPU, over random weights, with experts drawn uniformly at
random: rows that decode after contexts of 3,500 tokens, as captured graphs, and prompts of up to 3,500 tokens. The ways
take turns, `repeats` times each; figures are medians of the slowest rank. "muted" is a whole step in which each rank
uses its own tensors in place of those of all ranks: its time is what would be left if the exchange took none.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.exchange.processes import on_each_gpu
from bench.node.measure import SHAPE
from bench.node.muted import MutedExchange
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.steps import CONTEXT
from engine.batch import Row
from engine.config import EngineConfig
from engine.exchange.peer import PeerExchange
from engine.model.state import make_state
from engine.parallel.layout import Layout
from engine.runner.sizes import padded_size, step_sizes
from engine.runner.two_batch_times import StepTimer
from engine.settings.device import Hardware, resolve

WAYS = ("whole", "in two", "muted")


@dataclass(frozen=True)
class Options:
    layout: Layout
    model: MeasuredModel
    rows: tuple[int, ...]
    prompts: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class Case:
    kind: str
    tokens: int
    # Seconds by way.
    seconds: dict[str, float]


def measure(options: Options, exchange: PeerExchange) -> list[Case]:
    """Run by all ranks at once."""
    muted = MutedExchange(exchange)
    with tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig(**options.model.settings(Path(scratch)))
        model = make_rank(resolve(config, Hardware(torch.cuda.device_count(), 0)), muted)
    kv_dtype = torch.float8_e4m3fn if options.model.kv == "fp8" else model.dtype
    state = make_state(model.config, model.device, blocks=1, positions=CONTEXT, rows=1, kv_dtype=kv_dtype)
    sizes = step_sizes(max(*options.rows, *options.prompts))
    timer = StepTimer(model, state, CONTEXT, lambda tokens: padded_size(tokens, sizes), graphs=True)
    return measure_steps(timer, muted, options)


@torch.inference_mode()
def measure_steps(timer: StepTimer, exchange: MutedExchange, options: Options) -> list[Case]:
    steps: list[tuple[str, list[Row]]] = [("decode", timer.decoding(count, 0)) for count in options.rows]
    steps += [("prompts", timer.prompts(tokens)) for tokens in options.prompts]
    return [_case(timer, exchange, kind, rows, options.repeats) for kind, rows in steps]


def _case(timer: StepTimer, exchange: MutedExchange, kind: str, rows: Sequence[Row], repeats: int) -> Case:
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way in WAYS:
            seconds[way].append(_seconds(timer, exchange, rows, way))
    tokens = sum(row.tokens for row in rows)
    return Case(kind, tokens, {way: median(found) for way, found in seconds.items()})


def _seconds(timer: StepTimer, exchange: MutedExchange, rows: Sequence[Row], way: str) -> float:
    exchange.muted = way == "muted"
    found = timer.seconds(rows, halved=way == "in two")
    exchange.muted = False
    return timer.slowest(found)


def table(cases: Sequence[Case], layout: Layout) -> Table:
    shown = Table(title=f"ms a step, tp {layout.tp}, dp {layout.dp}, ep {layout.ep}")
    for column in ("", "tokens a rank", *WAYS, "in two / whole", "whole / muted", "in two / muted"):
        shown.add_column(column, justify="right")
    for case in cases:
        whole, in_two, muted = (case.seconds[way] * 1000 for way in WAYS)
        ratios = (in_two / whole, whole / muted, in_two / muted)
        times = (f"{each:.3f}" for each in (whole, in_two, muted))
        shown.add_row(case.kind, str(case.tokens), *times, *(f"{each:.3f}" for each in ratios))
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, help="by default the GPUs that tp leaves")
    parser.add_argument("--ep", type=int, help="by default one part a rank")
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--experts", choices=("w4a8", "fp8"), default="w4a8")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    dp = arguments.dp or torch.cuda.device_count() // arguments.tp
    if max(arguments.tp * dp, 2) > torch.cuda.device_count():
        parser.error(f"there are {torch.cuda.device_count()} CUDA devices here")
    layout = Layout(arguments.tp, dp, arguments.ep or arguments.tp * dp)
    steps = tuple(arguments.rows), tuple(arguments.prompts)
    model = MeasuredModel(SHAPE, arguments.layers, arguments.experts, arguments.kv)
    options = Options(layout, model, *steps, arguments.repeats)
    cases = on_each_gpu(layout, partial(measure, options))[0]
    Console(width=150).print(table(cases, layout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
