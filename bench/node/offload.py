"""DeepSeek-R1 on fewer GPUs than its weights need: steps of ranks that keep some layers' experts in host memory.

`python -m bench.node.offload [--tp N] [--dp N] [--layers N] [--experts w4a8|fp8] [--kv fp8|bf16] [--offload auto|N]
[--slots N] [--prompts 4096 16384] [--rows 32]`

The bench runs the serving engine's layers, in one process a GPU, over random weights, with experts drawn uniformly at
random: prompts of up to 3,500 tokens, and rows that decode after contexts of as many, as captured graphs. A time is the
shortest of three, on the slowest rank. Tokens are those of one rank that batches. Work is the peak memory of steps
in addition to the weights, and the amount that engine.offload.layers=auto assumes. The first rank logs each phase
that has passed.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.exchange.processes import on_each_gpu
from bench.node.measure import SHAPE
from bench.rank.model import MeasuredModel, make_rank
from bench.rank.steps import CONTEXT
from engine.config import EngineConfig
from engine.exchange.peer import PeerExchange
from engine.memory.rank_memory import work_bytes
from engine.model.state import make_state
from engine.offload.config import OffloadConfig
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.runner.sizes import padded_size, step_sizes
from engine.runner.two_batch_times import StepTimer
from engine.settings.device import Hardware, resolve
from mesh.config import ObserveConfig
from mesh.observe.logs import configure
from mesh.start_times import StartTimes, process_seconds

_log = logging.getLogger("deepmesh.bench")


@dataclass(frozen=True)
class Options:
    layout: Layout
    model: MeasuredModel
    offload: OffloadConfig
    prompts: tuple[int, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    kind: str
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Figures of one rank. `reckoned_work`: the bytes of work that "auto" assumes for the largest step."""

    offloaded: int
    host_bytes: int
    weights_bytes: int
    work_bytes: int
    reckoned_work: int
    steps: Sequence[Step]


class Phases:
    """Logs on the first rank how long each phase took, so that a run that is cut off shows how far it came."""

    def __init__(self, rank: int) -> None:
        configure(f"rank {rank}", ObserveConfig(log_level="WARNING" if rank else "INFO"))
        self._times = StartTimes()

    def passed(self, phase: str) -> None:
        self._times.mark(phase)
        fields = {"seconds": round(self._times.seconds[phase], 1), "since_start": round(process_seconds(), 1)}
        _log.info(phase, extra={"fields": fields})


def measure(options: Options, exchange: PeerExchange) -> Measured:
    """Run by all ranks at once."""
    layout, largest = options.layout, max(*options.prompts, *options.rows)
    phases = Phases(exchange.place.rank)
    phases.passed("ready to begin")
    with tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig(
            **options.model.settings(Path(scratch)),
            max_step_tokens=largest,
            context_tokens=CONTEXT,
            parallel=ParallelConfig(tp=layout.tp, dp=layout.dp, ep=layout.ep),
            offload=options.offload,
        )
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        model = make_rank(resolved, exchange)
    torch.cuda.synchronize()
    phases.passed("weights")
    kv_dtype = getattr(torch, resolved.kv_dtype)
    state = make_state(model.config, model.device, blocks=1, positions=CONTEXT, rows=1, kv_dtype=kv_dtype)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    sizes = step_sizes(largest)
    timer = StepTimer(model, state, CONTEXT, lambda tokens: padded_size(tokens, sizes), graphs=True)
    work = [("prompts", timer.prompts(tokens)) for tokens in options.prompts]
    work += [("decode", timer.decoding(count, 0)) for count in options.rows]
    steps = []
    with torch.inference_mode():
        for kind, rows in work:
            seconds = timer.slowest(timer.seconds(rows, halved=False))
            steps.append(Step(kind, sum(row.tokens for row in rows), seconds))
            phases.passed(f"{kind}, {steps[-1].tokens} tokens: {seconds * 1000:.1f} ms a step")
    return Measured(
        offloaded=0 if model.offloaded is None else len(model.offloaded.ring.layers),
        host_bytes=0 if model.offloaded is None else model.offloaded.memory.host_bytes,
        weights_bytes=weights,
        work_bytes=torch.cuda.max_memory_allocated() - weights,
        reckoned_work=work_bytes(model.config, largest, model.dtype.itemsize, exchange.place.layout.world),
        steps=steps,
    )


def table(found: Measured, options: Options) -> Table:
    layout = options.layout
    where = f"tp {layout.tp}, dp {layout.dp}, ep {layout.ep} on {layout.world} x {torch.cuda.get_device_name()}"
    what = f"{options.model.title}, {found.offloaded} layers offloaded"
    shown = Table(title=f"{what}, {where}")
    for column in ("", "tokens", "step ms", "tokens/s a GPU", "link GB/s a GPU"):
        shown.add_column(column, justify="right")
    for step in found.steps:
        rate = step.tokens / step.seconds / layout.tp
        link = found.host_bytes / step.seconds / 1e9
        shown.add_row(step.kind, f"{step.tokens:,}", f"{step.seconds * 1000:.1f}", f"{rate:,.0f}", f"{link:.1f}")
    return shown


def _layers(text: str) -> int | str:
    return text if text == "auto" else int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, help="by default the GPUs that tp leaves")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--experts", choices=("w4a8", "fp8"), default="w4a8")
    parser.add_argument("--kv", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--offload", type=_layers, default="auto", help="layers in host memory, or auto")
    parser.add_argument("--slots", type=int, default=2, help="layers that the GPU has room for at a time")
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rows", type=int, nargs="+", default=[32])
    arguments = parser.parse_args()
    dp = arguments.dp or torch.cuda.device_count() // arguments.tp
    if max(arguments.tp * dp, 2) > torch.cuda.device_count():
        parser.error(f"there are {torch.cuda.device_count()} CUDA devices here")
    layout = Layout(arguments.tp, dp, arguments.tp * dp)
    offload = OffloadConfig(layers=arguments.offload, slots=arguments.slots)
    steps = tuple(arguments.prompts), tuple(arguments.rows)
    model = MeasuredModel(SHAPE, arguments.layers, arguments.experts, arguments.kv)
    options = Options(layout, model, offload, *steps)
    found = on_each_gpu(layout, partial(measure, options))[0]
    console = Console(width=140)
    console.print(table(found, options))
    weights, host, work, reckoned = (
        f"{size / 1e9:.1f} GB"
        for size in (found.weights_bytes, found.host_bytes, found.work_bytes, found.reckoned_work)
    )
    console.print(f"a GPU: weights {weights}, in host memory {host}; work {work}, reckoned with {reckoned}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
