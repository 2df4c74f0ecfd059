"""How fast KV moves in a running mesh: what its workers have measured of their pushes, fetches and copies."""

from collections.abc import Callable, Sequence
from statistics import median

from deepmesh.internal.v1 import scheduler_pb2

# For each rate of a cost model: how to read it from a worker's status, and what to call it.
RATES: dict[str, tuple[Callable[[scheduler_pb2.WorkerStatus], float], str]] = {
    "push_bytes_per_second": (lambda worker: worker.load.push_bytes_per_second, "pushes between workers"),
    "fetch_bytes_per_second": (lambda worker: worker.transfers.fetch_bytes_per_second, "fetches from stores' memory"),
    "disk_fetch_bytes_per_second": (
        lambda worker: worker.transfers.disk_fetch_bytes_per_second,
        "fetches from stores' disks",
    ),
    "host_read_bytes_per_second": (
        lambda worker: worker.load.host_tier.read_bytes_per_second,
        "copies from workers' host memory",
    ),
}


def transfer_rates(workers: Sequence[scheduler_pb2.WorkerStatus], show: Callable[[str], None]) -> dict[str, float]:
    """Bytes a second, as fields of `mesh.costs.CostModel`: the median of the workers that have measured a rate. A rate
    that no worker has measured is left out.
    """
    rates = {}
    for name, (rate_of, what) in RATES.items():
        # If a worker has several ranks, its rate is their mean.
        measured = [rate for worker in workers if (rate := rate_of(worker))]
        if measured:
            rates[name] = median(measured)
            show(f"{what}: {rates[name] / 1e9:.2f} GB/s, as {len(measured)} of {len(workers)} workers measured")
        else:
            show(f"{what}: not measured, since no worker made any")
    return rates
