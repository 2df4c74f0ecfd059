"""Prompts and decode steps of one rank of DeepSeek-R1, with and without experts in host memory, in one run.

`python -m bench.rank.offload [--layers 21] [--offloaded 0 6 9 18] [--slots 2] [--experts fp8|w4a8|nvfp4]
[--requests 32] [--no-decode] [--out FILE]`

The others of --offloaded are compared with the first. Steps of prompts have 16,384 tokens, four prompts of 4,096 each.
The link's rate in a step is the bytes of all offloaded layers over the step's time; the ceiling is one copy of a GB
from page-locked memory with no other copy. FILE gets all rows as JSON.
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from bench.rank.load import RankLoad, fill_pool
from bench.rank.model import MeasuredModel, make_rank
from capacity.shapes import EXPERTS, SHAPES
from engine.config import EngineConfig
from engine.engine import Engine
from engine.offload.config import OffloadConfig
from engine.offload.host_pages import HostPages
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve

STEP_TOKENS, PROMPT_TOKENS, STEPS = 16384, 4096, 5
DECODE_CONTEXT, WARM_STEPS, DECODE_STEPS = 3500, 6, 20
SPARE_TOKENS = 256
LINK_BYTES = 1 << 30


@dataclass(frozen=True)
class Offloaded:
    """Figures with the experts of `layers` layers in host memory. `decode_ms` is None if it was not measured."""

    layers: int
    host_bytes: int
    device_bytes: int
    load_seconds: float
    step_ms: float
    decode_ms: float | None

    @property
    def tokens_per_second(self) -> float:
        return STEP_TOKENS / self.step_ms * 1000


def measure(measured: MeasuredModel, offload: OffloadConfig, requests: int | None) -> Offloaded:
    """requests: how many decode at once; None leaves decoding out."""
    with tempfile.TemporaryDirectory() as scratch:
        config = EngineConfig(
            **measured.settings(Path(scratch)),
            max_requests=requests or STEP_TOKENS // PROMPT_TOKENS,
            graph_rows=(requests or 1,),
            decode_graphs="auto" if requests else "off",
            max_step_tokens=STEP_TOKENS,
            context_tokens=PROMPT_TOKENS + SPARE_TOKENS,
            offload=offload,
            # The bench runs each kind of step once before it measures.
            warm_up="off",
        )
        resolved = resolve(config, Hardware(torch.cuda.device_count(), 0))
        started = time.perf_counter()
        model = make_rank(resolved)
        torch.cuda.synchronize()
        load_seconds, device_bytes = time.perf_counter() - started, torch.cuda.memory_allocated()
        backend = ModelBackend(resolved, model)
    load = RankLoad(Engine(config, backend, time.monotonic), backend)
    fill_pool(backend.state)
    prompts = STEPS * STEP_TOKENS // PROMPT_TOKENS
    # The first of the two runs compiles kernels.
    _, seconds = (load.prefill_seconds(prompts, PROMPT_TOKENS) for _ in range(2))
    decode_ms = None
    if requests is not None:
        load.start_decoding(requests, DECODE_CONTEXT, WARM_STEPS + DECODE_STEPS + 4)
        load.decode_seconds(WARM_STEPS)
        decode_ms = 1000 * median(load.decode_seconds(DECODE_STEPS))
        load.drain()
    return Offloaded(
        layers=0 if model.offloaded is None else len(model.offloaded.ring.layers),
        host_bytes=0 if model.offloaded is None else model.offloaded.memory.host_bytes,
        device_bytes=device_bytes,
        load_seconds=load_seconds,
        step_ms=1000 * seconds / STEPS,
        decode_ms=decode_ms,
    )


def link_rate() -> float:
    """Bytes a second of one large copy to the device, with no other copy."""
    source = HostPages(LINK_BYTES, page_locked=True)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda")
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source.tensor, non_blocking=True)
    start.record()
    target.copy_(source.tensor, non_blocking=True)
    stop.record()
    stop.synchronize()
    return LINK_BYTES / float(start.elapsed_time(stop)) * 1000


def table_of(rows: Sequence[Offloaded], ceiling: float, title: str) -> Table:
    table = Table(title=f"{title}; the link alone: {ceiling / 1e9:.1f} GB/s")
    for column in ("offloaded", "host GB", "weights on the GPU, GB", "loaded in s", "prompts: step ms", "tokens/s"):
        table.add_column(column, justify="right")
    for column in ("against none", "link GB/s", "decode: step ms", "against none", "link GB/s"):
        table.add_column(column, justify="right")
    first = rows[0]
    for row in rows:
        cells = [str(row.layers), f"{row.host_bytes / 1e9:.1f}", f"{row.device_bytes / 1e9:.1f}"]
        cells.append(f"{row.load_seconds:.0f}")
        cells += [f"{row.step_ms:.1f}", f"{row.tokens_per_second:,.0f}", f"{first.step_ms / row.step_ms:.3f}"]
        cells.append(f"{row.host_bytes / row.step_ms / 1e6:.1f}")
        if row.decode_ms is not None and first.decode_ms is not None:
            cells += [f"{row.decode_ms:.2f}", f"{first.decode_ms / row.decode_ms:.3f}"]
            cells.append(f"{row.host_bytes / row.decode_ms / 1e6:.1f}")
        table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="r1-ep8-rank")
    parser.add_argument("--layers", type=int, default=21, help="of the model; three of R1's have no experts")
    parser.add_argument("--offloaded", type=int, nargs="+", default=[0, 6, 9, 18], help="layers in host memory")
    parser.add_argument("--slots", type=int, default=2, help="layers that the GPU has room for at a time")
    parser.add_argument("--experts", choices=sorted(EXPERTS), default="fp8")
    parser.add_argument("--requests", type=int, default=32, help="that decode at once")
    parser.add_argument("--no-decode", action="store_true", help="leave out steps that decode")
    parser.add_argument("--out", type=Path, help="a file for the rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a rank is measured on a CUDA device, and there is none here")
    console = Console(width=180)
    model = MeasuredModel(arguments.shape, arguments.layers, arguments.experts)
    rows: list[Offloaded] = []
    for count in arguments.offloaded:
        offload = OffloadConfig(layers=count, slots=arguments.slots)
        requests = None if arguments.no_decode else arguments.requests
        rows.append(measure(model, offload, requests))
        console.print(rows[-1])
        # Free this model before the next one is made, which needs the memory.
        gc.collect()
        torch.cuda.empty_cache()
    form = f"{arguments.experts} experts, {arguments.slots} slots"
    title = f"{arguments.shape}, {arguments.layers} layers, {form}, on one {torch.cuda.get_device_name()}"
    console.print(table_of(rows, link_rate(), title))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
