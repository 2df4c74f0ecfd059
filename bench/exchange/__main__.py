"""`python -m bench.exchange [--ranks N] [--hosts N]`: microseconds of each exchange in a CUDA graph, and of NCCL's, in
one run. With --hosts the ranks exchange as ranks of N hosts do, over NCCL; it takes what this host has, and the network
with NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1.
"""

import argparse
from functools import partial

from rich.console import Console
from rich.table import Table

from bench.exchange.measure import measure, wire_rate
from bench.exchange.processes import on_each_gpu, on_gpus_of_hosts
from engine.parallel.layout import Layout
from mesh.ports import free_port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1)
    arguments = parser.parse_args()
    ranks, hosts = arguments.ranks, arguments.hosts
    rate, act = wire_rate(), partial(measure, free_port())
    layout = Layout(dp=ranks, ep=ranks, hosts=hosts)
    by_rank = on_each_gpu(layout, act) if hosts == 1 else on_gpus_of_hosts(layout, free_port(), act)
    shown = Table(title=f"{ranks} GPUs, hosts: {hosts}; us in a graph; wire at {rate / 1e9:.0f} GB/s a direction")
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
