"""Prefill workers on loopback ports, landings for their KV, and a decode worker's side of the call."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
import psutil
from deepmesh.internal.v1 import prefill_pb2, prefill_pb2_grpc, targets_pb2
from deepmesh.v1 import common_pb2

from engine.protocol.messages import Ready
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.shares import ONE_TENANT
from mesh.domain.workers import WorkerRole
from mesh.errors import MeshError
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error
from mesh.rpc.server import MeshServer, Registration
from prefill_svc.__main__ import SERVICE
from prefill_svc.config import PrefillConfig
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillWorker
from tests.support.addresses import NOWHERE
from tests.support.fake_rank import TRANSFER_READY, FakeRankClient
from tests.support.forking import forked_services
from tests.support.scheduling import ManualClock
from tests.support.waiting import PATIENCE_SECONDS, eventually
from transfer.ticket import Segment, Ticket
from transfer.wire import ticket_message
from worker.ranks.group import RankGroup
from worker.ranks.host import RankHost

TOTAL_BLOCKS = 512
# A Ready message with the fields that a landing for an oracle rank's KV needs.
ORACLE_READY = msgspec.structs.replace(
    TRANSFER_READY, namespace=KvNamespace("oracle-1000", "oracle", 1, "oracle:1"), block_bytes=512
)


def make_ticket(
    prompt_tokens: int, held_blocks: int = 0, name: int = 1, ready: Ready = TRANSFER_READY, **changes: Any
) -> Ticket:
    """The ticket of a landing with one segment for each block, as a rank with this Ready message opens it."""
    blocks = -(-prompt_tokens // BLOCK_TOKENS) - held_blocks
    segments = tuple(
        Segment(
            index=block,
            destination_rank=0,
            worker_address=b"address of the receiver",
            first_layer=0,
            layer_count=ready.namespace.layers,
            first_block=block,
            block_count=1,
            size_bytes=ready.block_bytes,
        )
        for block in range(blocks)
    )
    ticket = Ticket(
        transfer_id=name.to_bytes(16, "big"),
        attempt=0,
        secret=bytes(32),
        tag=1000 * name,
        deadline_ms=20_000,
        namespace=ready.namespace,
        segments=segments,
    )
    return msgspec.structs.replace(ticket, **changes)


def prefill_request(
    token_ids: Sequence[int], ticket: Ticket | None = None, held_blocks: int = 0, **fields: Any
) -> prefill_pb2.PrefillRequest:
    ticket = ticket or make_ticket(len(token_ids), held_blocks)
    return prefill_pb2.PrefillRequest(
        **{
            "request_id": "r",
            "token_ids": token_ids,
            "sampling": common_pb2.SamplingParams(),
            "ticket": ticket_message(ticket),
            "held_blocks": held_blocks,
            **fields,
        }
    )


def prefill_config(**changes: Any) -> PrefillConfig:
    """An oracle worker without a scheduler; `engine` is merged into the defaults here."""
    engine = {
        "backend": "oracle",
        "total_blocks": TOTAL_BLOCKS,
        "max_requests": 32,
        "transfer": {"landing_seconds": 20},
        **changes.pop("engine", {}),
    }
    values = {"server": {"drain_seconds": 5}, "scheduler": NOWHERE, "engine": engine, "worker_id": "prefill-1"}
    return PrefillConfig.model_validate(values | changes)


@dataclass
class RunningPrefill:
    worker: PrefillWorker
    endpoint: str
    # The fake rank, and the clock of deadlines, which tests move.
    rank: FakeRankClient = field(repr=False)
    clock: ManualClock


@asynccontextmanager
async def prefill_without_rank(ready: Ready = TRANSFER_READY, **changes: Any) -> AsyncIterator[RunningPrefill]:
    """A prefill worker whose rank does what the test says. Asserts at the end that it keeps nothing."""
    config, rank, clock = prefill_config(**changes), FakeRankClient(ready), ManualClock()
    ranks = RankGroup([rank])  # type: ignore[list-item]
    async with serving(config) as (servicer, server):
        worker = PrefillWorker(
            config, RankHost.of(ranks, config, WorkerRole.PREFILL, server.endpoint, Channels()), clock
        )
        servicer.open(worker)
        following = asyncio.create_task(worker.run())
        yield RunningPrefill(worker, server.endpoint, rank, clock)
        await eventually(lambda: worker.live_requests == 0)
        backlog = worker.jobs.backlog(ONE_TENANT)
        assert (backlog.live_prompts, backlog.queued_tokens, worker.jobs.idle.is_set()) == (0, 0, True)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@dataclass
class RealPrefill:
    worker: PrefillWorker
    # The process of its first rank.
    rank: psutil.Process

    @property
    def target(self) -> targets_pb2.WorkerTarget:
        identity = self.worker.host.identity
        return targets_pb2.WorkerTarget(
            worker_id=identity.worker_id, endpoint=identity.endpoint, slot_bytes=identity.slot_bytes
        )


@asynccontextmanager
async def running_prefill(ranks: int = 1, **changes: Any) -> AsyncIterator[RealPrefill]:
    """A prefill worker in this process with its ranks in others. Asserts at the end that none of them holds anything.

    If the test killed a rank, it asserts that every call has ended.
    """
    changes["engine"] = {"parallel": {"dp": ranks}, **changes.get("engine", {})}
    config = prefill_config(**changes)
    async with serving(config) as (servicer, server):
        with forked_services():
            host = await RankHost.start(config, WorkerRole.PREFILL, server.endpoint, Channels())
        worker, rank = PrefillWorker(config, host), psutil.Process(host.ranks.ranks[0].process_id)
        try:
            servicer.open(worker)
            following = asyncio.create_task(worker.run())
            yield RealPrefill(worker, rank)
            await eventually(lambda: worker.live_requests == 0)
            if not following.done():
                await eventually(lambda: host.report.load.free_blocks == host.ready.total_blocks)
                await eventually(lambda: not host.report.transfers.open_pushes)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        finally:
            await worker.host.close()


@asynccontextmanager
async def serving(config: PrefillConfig) -> AsyncIterator[tuple[PrefillServicer, MeshServer]]:
    servicer = PrefillServicer()
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    async with MeshServer(config.server, "prefill", [Registration(add, servicer, SERVICE)]) as server:
        yield servicer, server


class PrefillCaller:
    """Makes one Prefill call as a decode worker does. `start` begins it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)

    def start(self, request: prefill_pb2.PrefillRequest) -> None:
        self.call = self._stub.Prefill(request)

    async def next(self) -> prefill_pb2.PrefillResponse:
        response = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        assert response is not grpc.aio.EOF, "the call ended well, and early"
        return response

    async def ended(self) -> MeshError | None:
        """Wait for the call's end, skipping messages; returns its error, or None if it ended well."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        return None

    def hang_up(self) -> None:
        self.call.cancel()


@asynccontextmanager
async def prefill_caller(endpoint: str) -> AsyncIterator[PrefillCaller]:
    async with Channels().open(endpoint) as channel:
        yield PrefillCaller(channel)
