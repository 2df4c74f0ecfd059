"""`python -m scheduler --config configs/scheduler.yaml`"""

import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from deepmesh.internal.v1 import scheduler_pb2_grpc
from deepmesh.keda import externalscaler_pb2_grpc

from mesh.background import background
from mesh.launch import launch
from mesh.rpc.channel import service_channels
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import server_tls
from scheduler.config import SchedulerConfig
from scheduler.coordinator import Coordinator
from scheduler.decisions import DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.placement.constants import constants_of
from scheduler.registry import Registry
from scheduler.scaling.arrivals import Arrivals
from scheduler.scaling.autoscaler_service import AutoscalerServicer
from scheduler.scaling.deletion_costs import DeletionCosts
from scheduler.scaling.scaler import Scaler
from scheduler.service import SchedulerServicer
from scheduler.store_link import PolledStore
from scheduler.stores import Stores
from scheduler.tenants import PlacedRequests
from scheduler.unreadable_kv import UnreadableKv

if TYPE_CHECKING:
    from scheduler.scaling.pod_costs import PodCosts

SERVICE = "deepmesh.internal.v1.SchedulerService"
SERVES = {
    "Place": (Role.GATEWAY,),
    "ReportOutcome": (Role.GATEWAY,),
    "ReportStatus": (Role.PREFILL, Role.DECODE),
    # Decode workers watch because they call only prefill workers that are in the registry. Operators watch because they
    # must see the workers whose roles they change.
    "WatchWorkers": (Role.GATEWAY, Role.DECODE, Role.OPERATOR, Role.AUTOSCALER),
    # The gateways' page shows decisions.
    "ListDecisions": (Role.GATEWAY, Role.OPERATOR),
    "GetScaling": (Role.OPERATOR, Role.AUTOSCALER),
}
AUTOSCALER_SERVICE = "externalscaler.ExternalScaler"
AUTOSCALER_SERVES = dict.fromkeys(("IsActive", "StreamIsActive", "GetMetricSpec", "GetMetrics"), (Role.AUTOSCALER,))
log = logging.getLogger(__name__)


def compose(
    config: SchedulerConfig, links: Sequence[PolledStore] = ()
) -> tuple[Registry, Scaler, DeletionCosts, list[Registration]]:
    """The scheduler's parts, put together: its registry, its scaler, its deletion costs, and its gRPC services."""
    constants = constants_of(config.placement)
    registry = Registry(time.monotonic, config.lease, constants.costs)
    stores, decisions = Stores(links), DecisionLog(config.decisions)
    coordinator = Coordinator(
        registry,
        stores,
        config.store_link.ignored_blocks,
        PlacedRequests(time.monotonic),
        decisions,
        OutputLengths(),
        constants,
        config.objectives,
        time.time,
    )
    scaling = config.scaling
    scaler = Scaler(
        registry,
        coordinator,
        Arrivals(time.monotonic, scaling.arrivals_seconds),
        constants,
        config.objectives,
        scaling,
        time.monotonic,
    )
    servicer = SchedulerServicer(registry, stores, coordinator, decisions, scaler, config.max_watchers)
    endless = ("ReportStatus", "WatchWorkers")
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    autoscaler = AutoscalerServicer(scaler, scaling.period_seconds)
    add_autoscaler = externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server
    registrations = [
        Registration(add, servicer, SERVICE, endless, SERVES),
        Registration(add_autoscaler, autoscaler, AUTOSCALER_SERVICE, ("StreamIsActive",), AUTOSCALER_SERVES),
    ]
    return registry, scaler, DeletionCosts(registry, coordinator, constants), registrations


@asynccontextmanager
async def running(config: SchedulerConfig) -> AsyncIterator[MeshServer]:
    """A ready scheduler, for the length of the block."""
    channels, tls = service_channels(config.security.tls), server_tls(config.security.tls)
    links = [PolledStore(endpoint, config.store_link, channels) for endpoint in config.stores]
    registry, scaler, costs, registrations = compose(config, links)
    async with AsyncExitStack() as stack:
        pod_costs = await _pod_costs(costs, stack) if config.pods.deletion_costs else None
        server = await stack.enter_async_context(MeshServer(config.server, "scheduler", registrations, tls))
        works = [registry.expire_forever(config.lease.seconds / 20)]
        works += [UnreadableKv(registry).run(config.lease.seconds / 20)]
        works += [link.run() for link in links]
        works += [scaler.run(config.scaling.period_seconds)]
        if pod_costs is not None:
            works += [pod_costs.run(config.pods.period_seconds)]
        async with background(*works):
            registry.begin_gathering()
            await server.ready()
            yield server


async def _pod_costs(costs: DeletionCosts, stack: AsyncExitStack) -> "PodCosts":
    # Imported here: httpx takes a sixth of a scheduler's start, and only this needs it.
    from scheduler.scaling.pod_costs import PodCosts
    from scheduler.scaling.pods import Cluster, Pods

    return PodCosts(costs.now, await stack.enter_async_context(Pods(Cluster.around_this_pod())))


async def serve(config: SchedulerConfig) -> None:
    """Run the scheduler until a signal."""
    async with running(config) as server:
        log.info("scheduler ready", extra={"fields": {"endpoint": server.endpoint}})
        await server.until_signal()


if __name__ == "__main__":
    sys.exit(launch("scheduler", SchedulerConfig, serve))
