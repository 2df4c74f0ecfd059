"""What one rank of a worker computes in a decode step, on one GPU: exchanges with the other ranks are left out.

`python -m bench.node.one_rank [--tp N] [--dp N] [--ep N] [--layers N] [--experts w4a8|fp8] [--kv fp8|bf16]
[--requests 1 2 4]`

The model and the load are those of `bench.node`, of rank 0. For each number of requests it prints the time of a step,
and of a layer, from the end of one attention to that of the next: the microseconds by which each kernel moves the end
of all that has run so far on, on average. Kernels that run while others do and end before them count 0.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from re import search

from rich.console import Console
from rich.table import Table

from bench.node.measure import SHAPE, Options, resolve_for
from bench.node.muted import NoExchange
from bench.rank.kernel_trace import Interval, KernelTrace, trace_kernels
from bench.rank.load import RankLoad, fill_pool
from bench.rank.measure import GROUPS
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.steps import CONTEXT, start_steps, time_steps
from engine.engine import Engine
from engine.parallel.layout import Layout, Place
from engine.runner.backend import ModelBackend

TRACED_STEPS = 3
# Kernels of attention, of which a layer has one, and those of experts, which dense layers lack.
ATTENTION, EXPERTS = r"^decode_(single|pair)$|mla.*kernel|flash_fwd", GROUPS["experts"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", choices=("w4a8", "fp8"), default="w4a8")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=40, help="decode steps timed for each number")
    arguments = parser.parse_args()
    layout = Layout(arguments.tp, arguments.dp, arguments.ep)
    model = MeasuredModel(SHAPE, arguments.layers, arguments.experts, arguments.kv)
    options = Options(layout, model, next_n=0, steps=arguments.steps, step_tokens=2048, wire_rate=0.0, out=None)
    console = Console(width=120)
    for requests, step_ms, trace in measure(options, arguments.requests):
        console.print(f"{requests} requests: {step_ms:.4f} ms a step")
        console.print(layer_table(layers_of(trace)))
    return 0


def measure(options: Options, requests: Sequence[int]) -> Iterator[tuple[int, float, KernelTrace]]:
    """By number of requests: milliseconds of a step, and a trace of some steps."""
    with tempfile.TemporaryDirectory() as scratch:
        resolved = resolve_for(Path(scratch), options, sorted(set(requests)), gpus=options.layout.world)
        exchange = NoExchange(Place(options.layout, 0))
        backend = ModelBackend(resolved, make_rank(resolved, exchange), exchange)
        fill_pool(backend.state)
        engine = Engine(resolved.config, backend, time.monotonic)
        load = RankLoad(engine, backend)
        for count in requests:
            start_steps(load, count, CONTEXT, options.steps)
            step_ms = time_steps(load, count, options.steps).step_ms
            trace = trace_kernels(lambda: load.decode_seconds(TRACED_STEPS))
            load.drain()
            yield count, step_ms, trace
        engine.stop()
        while not engine.stopped:
            engine.step()


def layers_of(trace: KernelTrace) -> list[list[tuple[str, float]]]:
    """For each layer with experts, its kernels in the order of their ends, and by how many microseconds each moves the
    latest end on. A layer goes from the end of its attention to the end of the next one's. The last layer of a step is
    left out.
    """
    ordered = sorted(trace.intervals, key=lambda interval: interval.start)
    attention = [index for index, each in enumerate(ordered) if search(ATTENTION, each.name)]
    layers = []
    for first, following in pairwise(attention):
        kernels = [*ordered[first + 1 : following], ordered[following]]
        named = [each.name for each in kernels]
        # Between two steps lie the head, the draw, and the inputs of the next one.
        if any(search(EXPERTS, name) for name in named) and not any(search("likeliest|Memcpy", name) for name in named):
            layers.append(list(_moves(ordered[first].stop, kernels)))
    return layers


def _moves(latest: float, kernels: Sequence[Interval]) -> Iterator[tuple[str, float]]:
    for each in sorted(kernels, key=lambda interval: interval.stop):
        yield each.name, max(each.stop - latest, 0.0)
        latest = max(latest, each.stop)


def layer_table(layers: Sequence[Sequence[tuple[str, float]]]) -> Table:
    """Mean microseconds by kernel, and by how often it has run in the layer before."""
    times: defaultdict[tuple[str, int], float] = defaultdict(float)
    for layer in layers:
        seen: Counter[str] = Counter()
        for name, microseconds in layer:
            seen[name] += 1
            times[name, seen[name]] += microseconds
    whole = sum(times.values()) / max(len(layers), 1)
    shown = Table(title=f"a layer with experts: {whole:.1f} us, mean of {len(layers)}")
    shown.add_column("kernel, by its end")
    shown.add_column("us", justify="right")
    for (name, _), total in times.items():
        shown.add_row(name[:80], f"{total / len(layers):.2f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
