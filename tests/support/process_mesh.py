"""A whole mesh of real processes, as `deepmesh up` starts it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from deepmesh.internal.v1 import scheduler_pb2, scheduler_pb2_grpc, workers_pb2
from deepmesh.v1 import gateway_pb2_grpc

from launcher.composition import compose
from launcher.plan import MeshPlan, ServiceSpec
from launcher.restart import RestartPolicy
from launcher.serving import until_served
from launcher.supervisor import Supervisor
from mesh.addresses import host_of, with_port
from mesh.ports import free_port
from mesh.rpc.channel import OPTIONS, Channels
from tests.support.forking import forked_services
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import PATIENCE_SECONDS, eventually

# Oracle workers have this many token ids.
VOCABULARY = 512
# Longer waits than on a machine of its own. If many processes share two cores, a scheduler may answer late, and a
# killed process may be back late.
BUSY_MACHINE = ("gateway.dispatch.answer_seconds=1", "gateway.dispatch.worker_seconds=60")
# Longer waits for a store, for meshes that must fetch from it: if its answer or its bytes are late, a prompt is
# computed instead.
SLOW_STORE = (
    "scheduler.store_link.match_ms=5000",
    "gateway.dispatch.answer_seconds=10",
    "prefill.engine.transfer.fetch_seconds=30",
)
# An oracle's KV is eight bytes a token.
SMALL_SLOTS = {"transfer.slot_bytes": 65536}
# Room for 65,536 of an oracle's blocks: making tables for millions would take long.
STORE_BYTES = "kvstore.memory_bytes=33554432"
# Tests kill the same process again and again: each time it is started again at once, and it is never given up.
AT_ONCE = RestartPolicy(first_delay_seconds=0.1, served_seconds=0)


@dataclass
class ProcessMesh:
    """A running mesh: where it is reached, and what its processes are doing."""

    plan: MeshPlan
    # The endpoints of the processes, by name, as this process reaches them.
    endpoints: dict[str, str]
    supervisor: Supervisor
    gateway: gateway_pb2_grpc.GatewayServiceStub
    schedulers: list[scheduler_pb2_grpc.SchedulerServiceStub]
    lines: list[str] = field(default_factory=list)

    @property
    def http_url(self) -> str:
        return self.http_urls[0]

    @property
    def http_urls(self) -> list[str]:
        """The base URL of each gateway."""
        ports = [http_port for http_port, _ in self.plan.gateway_ports]
        hosts = [host_of(endpoint) for endpoint in self.gateway_endpoints]
        return [f"http://{with_port(host, port)}" for host, port in zip(hosts, ports, strict=True)]

    @property
    def grpc_endpoint(self) -> str:
        return self.endpoints["gateway"]

    @property
    def gateway_endpoints(self) -> list[str]:
        return [endpoint for name, endpoint in self.endpoints.items() if name.startswith("gateway")]

    async def snapshot(self, scheduler: int = 0) -> scheduler_pb2.WatchWorkersResponse:
        """The registry and the stores as they are now, for one of the schedulers."""
        watch = self.schedulers[scheduler].WatchWorkers(scheduler_pb2.WatchWorkersRequest(), timeout=PATIENCE_SECONDS)
        try:
            response: scheduler_pb2.WatchWorkersResponse = await watch.read()
            return response
        finally:
            watch.cancel()

    async def workers(self) -> list[scheduler_pb2.WorkerStatus]:
        """Decode and prefill workers."""
        return list((await self.snapshot()).workers)

    async def whole(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until every killed process is back: every scheduler knows every worker and every store, and every store
        has a session of every worker.
        """
        await eventually(self._is_whole, seconds)

    async def _is_whole(self) -> bool:
        try:
            snapshots = [await self.snapshot(number) for number in range(len(self.schedulers))]
        except grpc.aio.AioRpcError:
            return False
        return all(map(self._knows_all, snapshots))

    def _knows_all(self, snapshot: scheduler_pb2.WatchWorkersResponse) -> bool:
        alive = sum(map(_is_alive, snapshot.workers))
        attached = [store.attached_workers for store in snapshot.stores]
        return alive == self.plan.workers and attached == [self.plan.workers] * len(self.plan.store_ports)

    async def drained(self, seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until every worker reports that it runs nothing and that every block is free, and until no KV moves."""
        end = asyncio.get_running_loop().time() + seconds
        while held := _held(await self.snapshot()):
            assert asyncio.get_running_loop().time() < end, f"still held: {held}"
            await asyncio.sleep(0.05)


def _is_alive(worker: scheduler_pb2.WorkerStatus) -> bool:
    # Leases last at least two seconds and are renewed three times in that time.
    return worker.lease_remaining.ToMilliseconds() > 1000


def _held(snapshot: scheduler_pb2.WatchWorkersResponse) -> dict[str, str]:
    """The processes that still hold something, by name, with their own report."""
    busy = {worker.identity.worker_id: str(worker.load) for worker in snapshot.workers if not _is_empty(worker)}
    transfers = {worker.identity.worker_id: worker.transfers for worker in snapshot.workers}
    transfers |= {store.endpoint: store.transfers for store in snapshot.stores}
    return busy | {name: str(each) for name, each in transfers.items() if not _is_still(each)}


def _is_empty(worker: scheduler_pb2.WorkerStatus) -> bool:
    load = worker.load
    waiting = load.running_requests + load.waiting_requests + load.queued_prefill_tokens
    return waiting == 0 and load.free_blocks == worker.identity.total_blocks


def _is_still(transfers: workers_pb2.TransferStatus) -> bool:
    opened = transfers.open_landings + transfers.open_pushes + transfers.open_fetches
    return opened == 0 and transfers.free_slots == transfers.total_slots


def oracle_settings(**engine: object) -> tuple[str, ...]:
    """Settings of a mesh whose workers need no checkpoint. It can speak text nevertheless."""
    directory = tokenizer_directory(VOCABULARY, 1 << 17)
    values = {"backend": "oracle", "oracle.vocabulary_size": VOCABULARY, "total_blocks": 256, **SMALL_SLOTS, **engine}
    workers = [f"{role}.engine.{key}={value}" for role in ("decode", "prefill") for key, value in values.items()]
    return (*workers, STORE_BYTES, f'gateway.models=[{{"name": "oracle", "tokenizer_dir": "{directory}"}}]')


@asynccontextmanager
async def process_mesh(
    model_dir: Path | None = None,
    *,
    workers: int = 1,
    prefill: int = 0,
    stores: int = 0,
    settings: tuple[str, ...] = (),
    on_line: Callable[[str, str], None] | None = None,
    api_key: str | None = None,
    schedulers: int = 1,
    gateways: int = 1,
    deployed: Callable[[Sequence[ServiceSpec]], Sequence[ServiceSpec]] = lambda specs: specs,
) -> AsyncIterator[ProcessMesh]:
    """Run a mesh, which is whole when the block begins. Processes that die are started again. Asserts at the end that
    nothing is held anywhere.
    """
    store_ports = tuple(free_port() for _ in range(stores))
    settings = (*BUSY_MACHINE, *settings)
    plan = MeshPlan(
        model_dir,
        workers,
        free_port(),
        free_port(),
        free_port(),
        settings,
        prefill,
        store_ports,
        more_scheduler_ports=tuple(free_port() for _ in range(schedulers - 1)),
        gateways=gateways,
        resume_secret="of all gateways of a test",
        kv_secret="of all workers of a test",
    )
    lines: list[str] = []

    def keep(name: str, line: str) -> None:
        lines.append(f"{name} {line}")

    specs = deployed(compose(plan))
    endpoints = {spec.name: with_port(spec.host, spec.port) for spec in specs if spec.port is not None}
    supervisor = Supervisor(specs, on_line or keep, Channels(), AT_ONCE)
    with forked_services():
        try:
            await supervisor.start()
            keeping = asyncio.create_task(supervisor.until_failure())
            await until_served(endpoints["gateway"], workers, Channels(), api_key=api_key)
            async with AsyncExitStack() as stack:
                channels = {
                    name: await stack.enter_async_context(grpc.aio.insecure_channel(endpoint, options=OPTIONS))
                    for name, endpoint in endpoints.items()
                }
                mesh = ProcessMesh(
                    plan,
                    endpoints,
                    supervisor,
                    gateway_pb2_grpc.GatewayServiceStub(channels["gateway"]),
                    [
                        scheduler_pb2_grpc.SchedulerServiceStub(channel)
                        for name, channel in channels.items()
                        if name.startswith("scheduler")
                    ],
                    lines,
                )
                await mesh.whole()
                yield mesh
                await mesh.drained()
            keeping.cancel()
        finally:
            await supervisor.stop()
