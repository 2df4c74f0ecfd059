"""`python -m bench.exchange [--ranks N]`: microseconds of each exchange in a CUDA graph, and of NCCL's, in one run."""

import argparse
from functools import partial

from rich.console import Console
from rich.table import Table

from bench.exchange.measure import measure, wire_rate
from bench.exchange.processes import on_each_gpu
from engine.parallel.layout import Layout
from mesh.ports import free_port


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
        # Times of the slowest rank.
        times = {provider: max(found[name][1][provider] for found in by_rank) for provider in ("deepmesh", "NCCL")}
        microseconds = [wire_bytes / rate * 1e6, *(1e6 * seconds for seconds in times.values())]
        cells = [f"{each:.1f}" for each in microseconds]
        shown.add_row(name, *cells, f"{wire_bytes / times['deepmesh'] / 1e9:.0f}")
    Console(width=100).print(shown)


if __name__ == "__main__":
    main()
