"""One long prompt through DeepSeek-R1's first layers: on one GPU, and on all GPUs of a worker.

`python -m bench.node.long_prompts [--layers N] [--tokens 32768 65536 131072] [--step-tokens N] [--experts w4a8|fp8]
[--kv fp8|bf16] [--repeats N]`

The bench runs the serving engine over random weights, with experts drawn uniformly at random. "alone" is one GPU with
the whole model; all GPUs measure it at once, so that the power per GPU is the same as in the other cases. "one
computes" is a worker of all GPUs (dp) whose other ranks pad their steps; "together" is the same worker with
engine.parallel.context_parallel_tokens. Figures are median seconds until the first token, of the slowest GPU.
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
from bench.node.engines import RankEngine
from bench.node.measure import SHAPE
from bench.rank.model import MeasuredModel, make_rank
from engine.config import EngineConfig
from engine.exchange.peer import PeerExchange
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Group, Layout
from engine.settings.device import Hardware, ResolvedEngineConfig, resolve
from mesh.blocks import BLOCK_TOKENS

WAYS = ("alone", "one computes", "together")
# A chunk of fewer tokens is not divided.
FEWEST_TOKENS = 1024
SPARE_TOKENS = 256


@dataclass(frozen=True)
class Options:
    ranks: int
    model: MeasuredModel
    tokens: tuple[int, ...]
    # Most tokens of a step, for each rank that computes.
    step_tokens: int
    repeats: int


def measure_alone(options: Options, exchange: PeerExchange) -> list[float]:
    """Seconds by prompt, of the slowest rank. Each rank has the whole model and computes by itself."""
    with tempfile.TemporaryDirectory() as scratch:
        resolved = _resolved(options, Path(scratch), ParallelConfig(), options.step_tokens)
        model = make_rank(resolved)
    seconds = measure_prompts(RankEngine(resolved, model), options)
    return [max(exchange.all_gather(torch.tensor([each]), Group.WORLD).tolist()) for each in seconds]


def measure_worker(options: Options, exchange: PeerExchange) -> list[list[float]]:
    """Seconds by way, then by prompt. All prompts are the first rank's."""
    one = ParallelConfig(tp=1, dp=options.ranks, context_parallel_tokens=None)
    longest = max(options.tokens) + SPARE_TOKENS
    together = one.model_copy(update={"context_parallel_tokens": FEWEST_TOKENS, "context_parallel_reach": longest})
    with tempfile.TemporaryDirectory() as scratch:
        ways = [
            _resolved(options, Path(scratch), one, options.step_tokens),
            _resolved(options, Path(scratch), together, options.step_tokens * options.ranks),
        ]
        model = make_rank(ways[0], exchange)
        engines = (RankEngine(resolved, model, exchange, exchange.peers) for resolved in ways)
        return [measure_prompts(engine, options, first=exchange.place.rank == 0) for engine in engines]


def measure_prompts(engine: RankEngine, options: Options, *, first: bool = True) -> list[float]:
    """Seconds by prompt; empty on all ranks but the first. All ranks call it at once."""
    seconds = []
    if first:
        # This first prompt compiles the kernels.
        engine.load.prefill_seconds(1, min(options.tokens))
        for tokens in options.tokens:
            seconds.append(median(engine.load.prefill_seconds(1, tokens) for _ in range(options.repeats)))
            # Print each result as it comes, in case the run is cut off.
            Console(stderr=True).print(f"{tokens:,} tokens: {seconds[-1]:.3f} s")
    engine.stop()
    return seconds


def _resolved(options: Options, directory: Path, parallel: ParallelConfig, step_tokens: int) -> ResolvedEngineConfig:
    longest = max(options.tokens) + SPARE_TOKENS
    config = EngineConfig(
        **options.model.settings(directory),
        max_requests=1,
        graph_rows=(1,),
        max_step_tokens=step_tokens,
        context_tokens=longest,
        # No step is run to find out.
        total_blocks=-(-longest // BLOCK_TOKENS),
        parallel=parallel,
        # The bench runs each kind of step once before it measures.
        warm_up="off",
    )
    return resolve(config, Hardware(torch.cuda.device_count(), 0))


def table(options: Options, seconds: Sequence[Sequence[float]]) -> Table:
    """seconds: by way, then by prompt."""
    title = f"one prompt on {options.model.title}, {options.ranks} GPUs"
    shown = Table(title=title)
    for column in ("tokens", *(f"{way}, s" for way in WAYS), *(f"{way}, tokens/s" for way in WAYS), "together / alone"):
        shown.add_column(column, justify="right")
    for tokens, *each in zip(options.tokens, *seconds, strict=True):
        rates = [tokens / way for way in each]
        cells = [*(f"{way:.3f}" for way in each), *(f"{rate:,.0f}" for rate in rates), f"{rates[-1] / rates[0]:.2f}"]
        shown.add_row(f"{tokens:,}", *cells)
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--experts", choices=("w4a8", "fp8"), default="w4a8")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--step-tokens", type=int, default=16384, help="of each rank that computes")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    ranks = torch.cuda.device_count()
    if ranks < 2:
        parser.error(f"there are {ranks} CUDA devices here")
    model = MeasuredModel(SHAPE, arguments.layers, arguments.experts, arguments.kv)
    options = Options(ranks, model, tuple(arguments.tokens), arguments.step_tokens, arguments.repeats)
    layout = Layout(dp=ranks, ep=ranks)
    alone = on_each_gpu(layout, partial(measure_alone, options))[0]
    worker = on_each_gpu(layout, partial(measure_worker, options))[0]
    console = Console(width=150)
    console.print(table(options, [alone, *worker]))
    console.print(torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    sys.exit(main())
