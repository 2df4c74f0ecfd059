"""`python -m prefill_svc --config configs/prefill.yaml`"""

import sys

from deepmesh.internal.v1 import prefill_pb2_grpc

from mesh.channel import service_channels
from mesh.identity import Role
from mesh.launch import launch
from mesh.server import MeshServer, Registration
from mesh.tls import server_tls
from prefill_svc.config import PrefillConfig
from prefill_svc.service import PrefillServicer
from prefill_svc.worker import PrefillWorker
from worker.serving import serve_worker

SERVICE = "deepmesh.internal.v1.PrefillService"
SERVES = {"Prefill": (Role.DECODE,)}


async def serve(config: PrefillConfig) -> None:
    """Run a worker until a signal. Raises EngineFailed if one of its ranks dies before."""
    channels, servicer = service_channels(config.security.tls), PrefillServicer()
    add = prefill_pb2_grpc.add_PrefillServiceServicer_to_server
    registration = Registration(add, servicer, SERVICE, serves=SERVES)
    async with MeshServer(config.server, "prefill", [registration], server_tls(config.security.tls)) as server:
        worker = await PrefillWorker.start(config, server.endpoint, channels)
        try:
            servicer.open(worker)
            await serve_worker(worker, server, config, channels)
        finally:
            await worker.host.close()


if __name__ == "__main__":
    sys.exit(launch("prefill", PrefillConfig, serve))
