"""`python -m decode_svc --config configs/decode.yaml`"""

import os
import sys
import time

from deepmesh.internal.v1 import decode_pb2_grpc

from decode_svc.config import DecodeConfig
from decode_svc.prefill_link import PrefillLink
from decode_svc.registered import RegisteredPrefills
from decode_svc.registry_link import RegistryLink
from decode_svc.service import DecodeServicer
from decode_svc.worker import DecodeWorker
from mesh.addresses import split_addresses
from mesh.background import background
from mesh.domain.workers import WorkerRole
from mesh.launch import Program, launch
from mesh.rpc.channel import service_channels
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer, Registration
from mesh.tls import server_tls
from worker.events.service import KvEventsServicer
from worker.handover import Handover
from worker.hosts.first_host_link import serve_host
from worker.hosts.place import find_host
from worker.hosts.service import HostsServicer
from worker.role_change import RoleChange
from worker.role_service import RoleServicer
from worker.serving import serve_worker

SERVICE = "deepmesh.internal.v1.DecodeService"
SERVES = {"Attach": (Role.GATEWAY,), "TakeStream": (Role.GATEWAY,)}


async def serve(config: DecodeConfig) -> Program | None:
    """Run a worker until a signal or a change of its role. Raises EngineFailed if one of its ranks dies first."""
    place, config = find_host(config, os.environ)
    if place.number:
        await serve_host(config, WorkerRole.DECODE, place)
        return None
    hosts = HostsServicer(config, WorkerRole.DECODE)
    handover = Handover.take()
    change = RoleChange(config, WorkerRole.DECODE, handover)
    roles = RoleServicer(change)
    channels = service_channels(config.security.tls)
    registered = RegisteredPrefills(time.monotonic)
    servicer, prefill_link = DecodeServicer(), PrefillLink(channels, registered)
    events = KvEventsServicer(config.kv_events)
    add = decode_pb2_grpc.add_DecodeServiceServicer_to_server
    registrations = [Registration(add, servicer, SERVICE, ("Attach",), SERVES), roles.registration, hosts.registration]
    registrations.append(events.registration)
    async with MeshServer(config.server, "decode", registrations, server_tls(config.security.tls)) as server:
        worker = await DecodeWorker.start(config, server.endpoint, prefill_link, channels, handover, hosts.hosts)
        links = [RegistryLink(each, channels, registered) for each in split_addresses(config.scheduler)]
        try:
            async with background(*(link.run() for link in links)):
                servicer.open(worker)
                roles.open(worker.host, server)
                events.open(worker.host)
                following = await serve_worker(worker, server, config, channels, change)
        finally:
            await prefill_link.close()
            await worker.host.close()
            hosts.hosts.close()
    return following


if __name__ == "__main__":
    sys.exit(launch("decode", DecodeConfig, serve))
