"""`python -m scheduler --config configs/scheduler.yaml`"""

import asyncio
import logging
import sys
import time

from deepmesh.v1 import scheduler_pb2_grpc

from mesh.launch import launch
from mesh.server import MeshServer, Registration
from scheduler.admission import Objectives
from scheduler.config import SchedulerConfig
from scheduler.coordinator import Coordinator
from scheduler.decisions import DecisionLog
from scheduler.lengths import OutputLengths
from scheduler.placement import PlacementKnobs
from scheduler.registry import Registry, RegistryLimits
from scheduler.service import SchedulerServicer

SERVICE = "deepmesh.v1.SchedulerService"
log = logging.getLogger(__name__)


def compose(config: SchedulerConfig) -> tuple[Registry, Registration]:
    """The scheduler's parts, put together: its registry, and its gRPC service."""
    limits = RegistryLimits(workers=config.lease.max_workers, cached_blocks=config.lease.max_cached_blocks)
    registry = Registry(time.monotonic, config.lease.seconds, config.lease.settle_seconds, limits)
    decisions = DecisionLog(config.decisions)
    knobs = PlacementKnobs(**config.placement.model_dump())
    objectives = Objectives(**config.objectives.model_dump())
    coordinator = Coordinator(registry, decisions, OutputLengths(), knobs, objectives, time.time)
    servicer = SchedulerServicer(registry, coordinator, decisions, config.max_watchers)
    endless = ("ReportStatus", "WatchWorkers")
    add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    return registry, Registration(add, servicer, SERVICE, endless)


async def serve(config: SchedulerConfig) -> None:
    """Run the scheduler until a signal."""
    registry, registration = compose(config)
    async with MeshServer(config.server, "scheduler", [registration]) as server:
        expiry = asyncio.create_task(registry.expire_forever(config.lease.seconds / 20))
        await server.ready()
        log.info("scheduler ready", extra={"fields": {"endpoint": server.endpoint}})
        await server.until_signal()
        expiry.cancel()


if __name__ == "__main__":
    sys.exit(launch("scheduler", SchedulerConfig, serve))
