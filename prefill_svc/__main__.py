"""`python -m prefill_svc --config configs/prefill.yaml`"""

import os
import sys

from deepmesh.internal.v1 import prefill_pb2_grpc

from mesh.domain.workers import WorkerRole
from mesh.launch import Program, launch
from mesh.rpc.channel import service_channels
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import server_tls
from prefill_svc.config import PrefillConfig
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillWorker
from worker.events.service import KvEventsServicer
from worker.handover import Handover
from worker.hosts.first_host_link import serve_host
from worker.hosts.place import find_host
from worker.hosts.service import HostsServicer
from worker.role_change import RoleChange
from worker.role_service import RoleServicer
from worker.serving import serve_worker

SERVICE = "deepmesh.internal.v1.PrefillService"
SERVES = {"Prefill": (Role.DECODE,)}


async def serve(config: PrefillConfig) -> Program | None:
    """Run a worker until a signal or a change of its role. Raises EngineFailed if one of its ranks dies first."""
    place, config = find_host(config, os.environ)
    if place.number:
        await serve_host(config, WorkerRole.PREFILL, place)
        return None
    hosts = HostsServicer(config, WorkerRole.PREFILL)
    handover = Handover.take()
    change = RoleChange(config, WorkerRole.PREFILL, handover)
    channels, servicer, roles = service_channels(config.security.tls), PrefillServicer(), RoleServicer(change)
    events = KvEventsServicer(config.kv_events)
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    registrations = [Registration(add, servicer, SERVICE, serves=SERVES), roles.registration, hosts.registration]
    registrations.append(events.registration)
    async with MeshServer(config.server, "prefill", registrations, server_tls(config.security.tls)) as server:
        worker = await PrefillWorker.start(config, server.endpoint, channels, handover, hosts.hosts)
        try:
            servicer.open(worker)
            roles.open(worker.host, server)
            events.open(worker.host)
            following = await serve_worker(worker, server, config, channels, change)
        finally:
            await worker.host.close()
            hosts.hosts.close()
    return following


if __name__ == "__main__":
    sys.exit(launch("prefill", PrefillConfig, serve))
