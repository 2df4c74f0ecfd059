"""`python -m bench.exchange [--ranks N]`: microseconds of each exchange in a CUDA graph, beside NCCL, in one run."""

import argparse
import os
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed

from bench.exchange.cases import Case, cases
from bench.exchange.processes import on_each_gpu
from bench.kernels.timing import time_graph
from engine.exchange.peer import PeerExchange
from engine.parallel.layout import Layout
from mesh.ports import free_port

# Calls of a graph, each with inputs of its own, for small tensors and for large ones.
CALLS, LARGE_CALLS = 20, 4
LARGE_BYTES = 16 << 20
COPIED_BYTES = 256 << 20
Times = dict[str, dict[str, float]]


def wire_rate() -> float:
    """Bytes a second of a copy between two GPUs."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    seconds: list[float] = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        stop.record()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop) / 1000)
    return COPIED_BYTES / min(seconds)


def measure(port: int, exchange: PeerExchange) -> dict[str, tuple[int, dict[str, float]]]:
    """By case: the bytes on the wire, and seconds by provider."""
    place = exchange.place
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    distributed.init_process_group("nccl", rank=place.rank, world_size=place.layout.world)
    found = {case.name: (case.wire_bytes, _times(case)) for case in cases(exchange)}
    distributed.destroy_process_group()
    exchange.check()
    return found


def _times(case: Case) -> dict[str, float]:
    calls = LARGE_CALLS if case.wire_bytes > LARGE_BYTES else CALLS
    return {name: time_graph([make() for _ in range(calls)]) for name, make in case.providers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    rate = wire_rate()
    by_rank = on_each_gpu(Layout(dp=ranks), partial(measure, free_port()))
    shown = Table(title=f"{ranks} GPUs, us in a graph; wire at {rate / 1e9:.0f} GB/s a direction")
    for column in ("rows of 7168 a rank", "wire", "deepmesh", "NCCL", "deepmesh GB/s"):
        shown.add_column(column, justify="right")
    for name, (wire_bytes, _) in by_rank[0].items():
        # The slowest rank's.
        times = {provider: max(found[name][1][provider] for found in by_rank) for provider in ("deepmesh", "NCCL")}
        microseconds = [wire_bytes / rate * 1e6, *(1e6 * seconds for seconds in times.values())]
        cells = [f"{each:.1f}" for each in microseconds]
        shown.add_row(name, *cells, f"{wire_bytes / times['deepmesh'] / 1e9:.0f}")
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
