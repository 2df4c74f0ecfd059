"""How fast KV moves in a mesh that runs: what its workers have measured of the pushes and fetches of their traffic."""

from collections.abc import Callable, Sequence
from statistics import median

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc

from mesh.channel import Channels
from mesh.failures import from_rpc_error
from mesh.identity import Role

ANSWER_SECONDS = 10.0
# What of a worker's status is which rate of a cost model, and in words.
RATES: dict[str, tuple[Callable[[scheduler_pb2.WorkerStatus], float], str]] = {
    "push_bytes_per_second": (lambda worker: worker.load.push_bytes_per_second, "pushes between workers"),
    "fetch_bytes_per_second": (lambda worker: worker.transfers.fetch_bytes_per_second, "fetches from stores' memory"),
    "disk_fetch_bytes_per_second": (
        lambda worker: worker.transfers.disk_fetch_bytes_per_second,
        "fetches from stores' disks",
    ),
}


async def transfer_rates(scheduler: str, channels: Channels, show: Callable[[str], None]) -> dict[str, float]:
    """Bytes a second, as fields of `mesh.costs.CostModel`: the median of the workers that have measured one. What
    nobody has measured is left out. Raises MeshError where the scheduler does not answer.
    """
    workers = await _workers(scheduler, channels)
    rates = {}
    for name, (rate_of, what) in RATES.items():
        # Where a worker has several ranks, its rate is a mean over them.
        measured = [rate for worker in workers if (rate := rate_of(worker))]
        if measured:
            rates[name] = median(measured)
            show(f"{what}: {rates[name] / 1e9:.2f} GB/s, as {len(measured)} of {len(workers)} workers measured")
        else:
            show(f"{what}: not measured, since no worker made any")
    return rates


async def _workers(scheduler: str, channels: Channels) -> Sequence[scheduler_pb2.WorkerStatus]:
    async with channels.open(scheduler, Role.SCHEDULER) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchWorkers(
            scheduler_pb2.WatchWorkersRequest(), timeout=ANSWER_SECONDS
        )
        try:
            return list((await call.read()).workers)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
