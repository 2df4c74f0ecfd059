"""What a request and a report cost the scheduler's process, gRPC included: `python -m bench.served_placement`.

Workers with full prefix indexes, as in `bench.placement`, report to one scheduler process, each over a stream of its
own. Requests are placed and their outcomes reported, sixteen at a time. The bench counts the processor time of that
process, which tells how much one scheduler can do.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import typer
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2

from bench.meshes.processes import cpu_seconds
from bench.placement import MODEL, drawn_blocks, drawn_chain, drawn_load, drawn_prefixes, identity_of
from launcher.process import Child
from mesh.domain.worker_wire import identity_message, load_message
from mesh.ports import free_port
from mesh.rpc.channel import Channels

AT_ONCE = 16
READY_SECONDS = 60.0
# The most that a request asks for; its answer has half as many.
OUTPUT_TOKENS = 1000


@dataclass(frozen=True)
class Cost:
    """Milliseconds of one core that the scheduler's process takes for a placement and for a report."""

    workers: int
    placement_ms: float
    report_ms: float

    def busy(self, requests_per_second: float, report_seconds: float) -> float:
        """The share of one core that is busy. requests_per_second: those of each worker; report_seconds: the time
        between two reports of a worker.
        """
        return self.workers * (requests_per_second * self.placement_ms + self.report_ms / report_seconds) / 1000


class Client:
    """Acts as the gateway and as all workers of one scheduler."""

    def __init__(self, stub: Any, workers: int) -> None:
        self._stub = stub
        self._workers = workers
        self._random = Random(1)
        self._prefixes = drawn_prefixes(self._random)
        self._streams: list[Any] = []
        self._placed = 0

    async def attach(self) -> None:
        for number in range(self._workers):
            stream = self._stub.ReportStatus()
            held = scheduler_pb2.KvEvents(snapshot=True, stored=drawn_blocks(self._prefixes, self._random))
            await self._report(stream, identity=identity_message(identity_of(number, self._workers)), kv_events=held)
            self._streams.append(stream)

    async def report(self, rounds: int) -> None:
        """Send `rounds` reports of each worker."""

        async def all_of(streams: Sequence[Any]) -> None:
            for _ in range(rounds):
                for stream in streams:
                    await self._report(stream)

        await asyncio.gather(*(all_of(self._streams[first::AT_ONCE]) for first in range(AT_ONCE)))

    async def place(self, requests: int) -> None:
        await asyncio.gather(*(self._place_in_turn(requests // AT_ONCE) for _ in range(AT_ONCE)))

    async def _place_in_turn(self, requests: int) -> None:
        for _ in range(requests):
            self._placed += 1
            name, chain = f"r{self._placed}", drawn_chain(self._prefixes, self._random)
            answer = await self._stub.Place(
                scheduler_pb2.PlaceRequest(
                    request_id=name,
                    generation_id=name,
                    attempt=1,
                    model=MODEL,
                    prompt_tokens=64 * len(chain),
                    max_tokens=OUTPUT_TOKENS,
                    block_hashes=chain,
                )
            )
            await self._stub.ReportOutcome(
                scheduler_pb2.ReportOutcomeRequest(
                    request_id=name,
                    generation_id=name,
                    attempt=1,
                    worker_id=answer.decode.worker_id,
                    outcome=scheduler_pb2.PLACEMENT_OUTCOME_FINISHED,
                    output_tokens=OUTPUT_TOKENS // 2,
                )
            )

    async def _report(self, stream: Any, **fields: Any) -> None:
        load = load_message(drawn_load(self._random))
        state = workers_pb2.WORKER_STATE_SERVING
        await stream.write(scheduler_pb2.ReportStatusRequest(state=state, load=load, **fields))
        await stream.read()


async def measure(workers: int, requests: int, reports: int) -> Cost:
    port, channels = free_port(), Channels()
    settings = {
        "server.port": port,
        "server.metrics_port": free_port(),
        "lease.seconds": READY_SECONDS * 10,
        "lease.gather_seconds": 0,
        "lease.max_workers": workers,
        "lease.max_cached_blocks": workers * 2000,
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    child = Child("scheduler", [sys.executable, "-P", "-m", "scheduler", *arguments], lambda name, line: None)
    await child.start()
    try:
        await child.wait_ready(f"127.0.0.1:{port}", channels, READY_SECONDS)
        async with channels.open(f"127.0.0.1:{port}") as channel:
            client = Client(scheduler_pb2_grpc.SchedulerServiceStub(channel), workers)
            await client.attach()
            before = cpu_seconds(child.process_id)
            await client.report(rounds := -(-reports // workers))
            reported = cpu_seconds(child.process_id)
            await client.place(requests)
            placed = cpu_seconds(child.process_id)
    finally:
        await child.stop(1.0)
    return Cost(workers, (placed - reported) / requests * 1000, (reported - before) / (rounds * workers) * 1000)


def main(
    workers: Annotated[list[int], typer.Option(help="Repeatable.")] = [12, 100, 1000],  # noqa: B006
    requests: int = 4000,
    reports: int = 4000,
    requests_per_second: Annotated[float, typer.Option(help="That each worker serves.")] = 1.667,
    report_seconds: Annotated[float, typer.Option(help="Between two reports of a worker.")] = 1.0,
) -> None:
    typer.echo("workers    a request, ms    a report, ms    busy")
    for each in workers:
        cost = asyncio.run(measure(each, requests, reports))
        busy = cost.busy(requests_per_second, report_seconds)
        typer.echo(f"{each:7}  {cost.placement_ms:15.3f}  {cost.report_ms:14.3f}  {busy:6.1%}")


if __name__ == "__main__":
    typer.run(main)
