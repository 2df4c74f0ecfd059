"""`deepmesh status`: the scheduler's view of workers and KV stores."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, TypeAlias

import grpc
import typer
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2
from google.protobuf.json_format import MessageToDict
from rich import box, filesize
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.endpoints import SCHEDULER, OperatorsCertificates, SchedulerOption, certified_channels
from mesh.domain.worker_wire import unreadable_kv
from mesh.errors import EndpointUnavailable
from mesh.rpc.channel import Channels
from mesh.rpc.identity import Role

Snapshot: TypeAlias = scheduler_pb2.WatchWorkersResponse

TIMEOUT_SECONDS = 5.0
WATCH_SECONDS = 1.0


def status(
    scheduler: SchedulerOption = SCHEDULER,
    certificates: OperatorsCertificates = None,
    as_json: Annotated[bool, typer.Option("--json", help="The scheduler's answer as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until Ctrl-C.")] = False,
) -> None:
    """Show the workers of a mesh, their load, their cache and their transfers, and its KV stores."""
    channels = certified_channels(certificates)
    if watch:
        with suppress(KeyboardInterrupt):
            (_watch_json if as_json else _watch_tables)(scheduler, channels)
        return
    snapshot = asyncio.run(read_workers(scheduler, channels))
    if as_json:
        _echo_json(snapshot, indent=2)
    else:
        Console().print(tables(snapshot))


async def _watch(
    endpoint: str, channels: Channels, show: Callable[[Snapshot], None], fail: Callable[[str], None]
) -> None:
    """Show the registry every second, or say why it cannot be read; never returns."""
    async with channels.open(endpoint, Role.SCHEDULER) as channel:
        while True:
            try:
                show(await _read(channel, endpoint))
            except EndpointUnavailable as error:
                fail(error.message)
            await asyncio.sleep(WATCH_SECONDS)


def _watch_tables(endpoint: str, channels: Channels) -> None:
    """On a terminal, each view replaces the last, and the final one stays. Otherwise they are printed one after
    another.
    """
    console = Console()
    if not console.is_terminal:
        asyncio.run(_watch(endpoint, channels, lambda snapshot: console.print(tables(snapshot)), console.print))
        return
    with Live(auto_refresh=False) as live:
        asyncio.run(
            _watch(
                endpoint,
                channels,
                lambda snapshot: live.update(tables(snapshot), refresh=True),
                lambda message: live.update(Text(message, style="red"), refresh=True),
            )
        )


def _watch_json(endpoint: str, channels: Channels) -> None:
    """Print one line each time."""
    show = partial(_echo_json, indent=None)
    asyncio.run(_watch(endpoint, channels, show, partial(typer.echo, err=True)))


def _echo_json(snapshot: Snapshot, indent: int | None) -> None:
    fields = MessageToDict(snapshot, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    unreadable = _unreadable(snapshot)
    for worker in fields["workers"]:
        worker["kv_unreadable"] = unreadable.get(worker["identity"]["worker_id"], "")
    typer.echo(json.dumps({"workers": fields["workers"], "stores": fields["stores"]}, indent=indent))


async def read_workers(endpoint: str, channels: Channels) -> Snapshot:
    """The registry now. Raises EndpointUnavailable."""
    async with channels.open(endpoint, Role.SCHEDULER) as channel:
        return await _read(channel, endpoint)


async def _read(channel: grpc.aio.Channel, endpoint: str) -> Snapshot:
    call = scheduler_pb2_grpc.SchedulerServiceStub(channel).WatchWorkers(
        scheduler_pb2.WatchWorkersRequest(), timeout=TIMEOUT_SECONDS
    )
    try:
        snapshot: Snapshot = await call.read()
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise EndpointUnavailable(f"what answers at {endpoint} is no scheduler") from error
        message = f"no scheduler answers at {endpoint}: is deepmesh up running? --scheduler names another"
        raise EndpointUnavailable(message) from error
    finally:
        call.cancel()
    return snapshot


def tables(snapshot: Snapshot) -> Group:
    """The tables of a mesh: workers; experts, if they move; transfers, if KV does; stores, if there are any."""
    shown = [workers_table(snapshot)]
    if any(worker.load.HasField("expert_imbalance") for worker in snapshot.workers):
        shown.append(experts_table(snapshot))
    if any(worker.transfers.total_slots for worker in snapshot.workers):
        shown.append(transfers_table(snapshot))
    if snapshot.stores:
        shown.append(stores_table(snapshot))
    return Group(*shown)


def workers_table(snapshot: Snapshot) -> Table:
    """One row for each worker, with its model below its name, and one for each rank if it has several; fits into eighty
    columns.

    Below the table: prefill workers that get no prompts, and why.
    """
    numbers = ("run", "wait", "to\nprefill", "blocks\nused", "blocks\ncached", "prefill\ntok/s", "step\nms")
    table = _table(("worker", "state"), numbers)
    table.title = None if snapshot.workers else "no workers"
    for worker in snapshot.workers:
        table.add_row(*_row(worker))
        for number, rank in enumerate(worker.ranks):
            table.add_row(*_rank_row(number, rank, worker.identity))
    unreadable = _unreadable(snapshot)
    if unreadable:
        table.caption_justify = "left"
        table.caption = "\n".join(
            f"{name} gets no prompt: no decode worker can read its KV ({why})" for name, why in unreadable.items()
        )
    return table


def experts_table(snapshot: Snapshot) -> Table:
    """One row for each worker whose ranks share the load of routed experts, as of its last measurement of it."""
    table = _table(("experts of",), ("busiest rank has, in\nits worst layer", "moved"))
    for worker in snapshot.workers:
        if worker.load.HasField("expert_imbalance"):
            above = f"{worker.load.expert_imbalance:.0%} above the mean"
            table.add_row(worker.identity.worker_id, above, f"{worker.load.experts_moved:,}")
    return table


def transfers_table(snapshot: Snapshot) -> Table:
    """One row for each process that moves KV: open transfers, and bytes since its start by UCX transport."""
    numbers = ("landings/\npushes/\nfetches", "slots\nfree", "quaran-\ntined", "received", "sent", "refused")
    table = _table(("KV moved by",), numbers)
    movers = [(worker.identity.worker_id, worker.transfers) for worker in snapshot.workers]
    movers += [(store.store_id, store.transfers) for store in snapshot.stores if store.store_id]
    for name, transfers in movers:
        table.add_row(
            name,
            f"{transfers.open_landings}/{transfers.open_pushes}/{transfers.open_fetches}",
            f"{transfers.free_slots}/{transfers.total_slots}",
            str(transfers.quarantined_slots),
            bytes_by_transport(transfers.received_bytes),
            bytes_by_transport(transfers.sent_bytes),
            str(sum(transfers.refused.values())),
        )
    return table


def stores_table(snapshot: Snapshot) -> Table:
    """One row for each tier of a store."""
    table = _table(("KV store", "tier"), ("blocks\nused", "size", "workers", "lookups", "hits"))
    for store in snapshot.stores:
        if not store.store_id:
            table.add_row(store.endpoint, "does not answer")
        for number, tier in enumerate(store.tiers):
            counts = () if number else (f"{store.attached_workers:,}", f"{store.lookups:,}", f"{store.hits:,}")
            size = filesize.decimal(tier.used_blocks * tier.block_bytes)
            table.add_row(store.store_id, tier.name, f"{tier.used_blocks:,}/{tier.total_blocks:,}", size, *counts)
    return table


def _table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in names:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def bytes_by_transport(sizes: Mapping[str, int]) -> str:
    """One line for each UCX transport."""
    return "\n".join(f"{transport} {filesize.decimal(size)}" for transport, size in sorted(sizes.items())) or "0"


def _unreadable(snapshot: Snapshot) -> dict[str, str]:
    return unreadable_kv(worker.identity for worker in snapshot.workers)


def _row(worker: scheduler_pb2.WorkerStatus) -> tuple[str, ...]:
    identity = worker.identity
    state = workers_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
    figures = _figures(worker.load, identity.max_requests, identity.total_blocks, worker.cached_blocks)
    return f"{identity.worker_id}\n{identity.model}", "silent" if worker.silent else state, *figures


def _rank_row(number: int, rank: workers_pb2.RankStatus, worker: workers_pb2.WorkerIdentity) -> tuple[str, ...]:
    requests, blocks = worker.max_requests // worker.ranks, worker.total_blocks // worker.ranks
    return f"  rank {number}", "", *_figures(rank.load, requests, blocks, rank.cached_blocks)


def _figures(load: workers_pb2.WorkerLoad, most_requests: int, blocks: int, cached_blocks: int) -> tuple[str, ...]:
    hosted = f"\n+ {load.host_tier.used_blocks:,} on host" if load.HasField("host_tier") else ""
    return (
        f"{load.running_requests}/{most_requests}",
        str(load.waiting_requests),
        f"{load.queued_prefill_tokens:,}",
        f"{blocks - load.free_blocks:,}/{blocks:,}",
        f"{cached_blocks:,}{hosted}",
        f"{load.prefill_tokens_per_second:,.0f}",
        f"{load.decode_step_ms:.1f}",
    )
