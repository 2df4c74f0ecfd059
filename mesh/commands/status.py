"""`deepmesh status`: what the scheduler knows of its workers."""

import asyncio
import json
from typing import Annotated

import grpc
import typer
from deepmesh.v1 import common_pb2, scheduler_pb2, scheduler_pb2_grpc
from google.protobuf.json_format import MessageToDict
from rich import box
from rich.console import Console
from rich.table import Table

from mesh.channel import open_channel
from mesh.commands.endpoints import SCHEDULER, SchedulerOption
from mesh.errors import EndpointUnavailable

TIMEOUT_SECONDS = 5.0


def status(
    scheduler: SchedulerOption = SCHEDULER,
    as_json: Annotated[bool, typer.Option("--json", help="The scheduler's answer as JSON.")] = False,
) -> None:
    """Show the workers of a mesh, their load and their cache."""
    snapshot = asyncio.run(read_workers(scheduler))
    if as_json:
        fields = MessageToDict(snapshot, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        typer.echo(json.dumps(fields["workers"], indent=2))
    else:
        Console().print(workers_table(snapshot))


async def read_workers(endpoint: str) -> scheduler_pb2.WatchWorkersResponse:
    """The registry now. Raises EndpointUnavailable."""
    async with open_channel(endpoint) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchWorkers(
            scheduler_pb2.WatchWorkersRequest(), timeout=TIMEOUT_SECONDS
        )
        try:
            snapshot: scheduler_pb2.WatchWorkersResponse = await call.read()
        except grpc.aio.AioRpcError as error:
            raise EndpointUnavailable(f"no scheduler answers at {endpoint}: is deepmesh up running?") from error
        finally:
            call.cancel()
    return snapshot


def workers_table(snapshot: scheduler_pb2.WatchWorkersResponse) -> Table:
    """One row a worker, with the model that it serves under its name; fits eighty columns."""
    title = None if snapshot.workers else "no workers"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("worker", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("run", "wait", "to\nprefill", "blocks\nused", "blocks\ncached", "prefill\ntok/s", "step\nms"):
        table.add_column(heading, justify="right")
    for worker in snapshot.workers:
        table.add_row(*_row(worker))
    return table


def _row(worker: scheduler_pb2.WorkerStatus) -> tuple[str, ...]:
    identity, load = worker.identity, worker.load
    used = identity.total_blocks - load.free_blocks
    state = common_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    return (
        f"{identity.worker_id}\n{identity.model}",
        state,
        f"{load.running_requests}/{identity.max_requests}",
        str(load.waiting_requests),
        f"{load.queued_prefill_tokens:,}",
        f"{used:,}/{identity.total_blocks:,}",
        f"{worker.cached_blocks:,}",
        f"{load.prefill_tokens_per_second:,.0f}",
        f"{load.decode_step_ms:.1f}",
    )
